"""LLM generation in JAX by DFlash and DFlash 2 speculative decoding."""

from __future__ import annotations

import importlib.metadata
import time
from typing import TYPE_CHECKING, Any

from dflash_jax.lazy import lazy_exports

if TYPE_CHECKING:
    from dflash_jax.engine import Completion, Engine, EngineConfig, EngineState, SamplingParams, Update
    from dflash_jax.errors import (
        CheckpointError,
        ConfigError,
        DflashError,
        InvariantError,
        RequestError,
        StateError,
    )

IMPORTED = time.time_ns()
"""When this process began to import the package: what is written to its sources later is not what runs."""

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DflashError",
    "Engine",
    "EngineConfig",
    "EngineState",
    "InvariantError",
    "RequestError",
    "SamplingParams",
    "StateError",
    "Update",
]

_import, _names = lazy_exports(
    __name__,
    {
        "engine": ["Completion", "Engine", "EngineConfig", "EngineState", "SamplingParams", "Update"],
        "errors": ["CheckpointError", "ConfigError", "DflashError", "InvariantError", "RequestError", "StateError"],
    },
)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for, so that `dflash-jax --help` does not wait for JAX."""
    return importlib.metadata.version("dflash_jax") if name == "__version__" else _import(name)


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return sorted({*_names(), "__version__"})
