"""Whether an engine's state fits the device, checked before it is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.init import empty_device
from dflash_jax.engine.memory import bytes_of
from dflash_jax.engine.state import Models
from dflash_jax.errors import ConfigError

_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how much memory the processes of a container may have together."""


def check_memory(models: Models, config: EngineConfig) -> None:
    """Refuses sizes whose slots and pages cannot fit the device, rather than have the system end the process.

    Args:
      models: the weights, loaded.
      config: the sizes.

    Raises:
      ConfigError: they do not fit; the message has both figures.
    """
    needed, there = state_bytes(models, config), device_bytes()
    if there is not None and needed > there:
        raise ConfigError(
            f"engine.max_slots {config.max_slots} of {config.max_model_len} tokens and {config.pool_pages} pages of "
            f"{config.page_size} tokens need {needed / (1 << 30):,.1f} GiB, and the device has "
            f"{there / (1 << 30):,.1f} GiB; make engine.num_pages, engine.max_slots or engine.max_model_len smaller"
        )


def state_bytes(models: Models, config: EngineConfig) -> int:
    """Bytes of an engine's slots and pages, from their shapes alone."""
    return bytes_of(lambda: empty_device(models, config))


def device_bytes() -> int | None:
    """Memory of the first device, of the machine or the container for CPUs; None if it is not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError):
        return None
    for path in _GROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            # There is no such group, or it is unlimited, for which it says "max".
            continue
    return min(limits)
