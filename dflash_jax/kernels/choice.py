"""Which implementation of an op computes it: said by the caller, else by the platform, else by the shape."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax

Implementation = Literal["reference", "xla", "pallas"]
"""The definition; plain XLA operations; a Mosaic GPU kernel for Hopper."""

_log = logging.getLogger(__name__)


def choose(op: str, implementation: Implementation | None, unsupported: str | None) -> Implementation:
    """What computes `op`.

    Args:
      op: its name, for the log.
      implementation: what the caller asks for; by default "pallas" on Hopper GPUs and "xla" elsewhere; on
        CPUs an op may then have something of its own.
      unsupported: why "pallas" does not do the shapes at hand, or None if it does. "xla" then takes
        its place, and the log says why, once per reason.
    """
    implementation = implementation or default()
    if implementation == "pallas" and unsupported:
        log_once(f"{op} falls back from pallas to xla: {unsupported}")
        return "xla"
    return implementation


def default() -> Implementation:
    """The fastest for the default backend, which is what a computation runs on unless it is told otherwise."""
    if jax.default_backend() != "gpu":
        return "xla"
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability == "9.0":
        return "pallas"
    log_once(
        f"kernels use xla: the pallas ones are for compute capability 9.0 (Hopper), "
        f"and {device.device_kind} has {capability}"
    )
    return "xla"


@functools.cache
def log_once(sentence: str) -> None:
    """Warns, unless the same was said before."""
    _log.warning(sentence)
