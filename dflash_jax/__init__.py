"""LLM generation in JAX by DFlash and DFlash 2 speculative decoding."""

from dflash_jax.engine import Completion, Engine, EngineConfig, EngineState, SamplingParams, Update
from dflash_jax.errors import CheckpointError, ConfigError, DflashError, InvariantError, RequestError

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
    "Update",
]
