"""The engine: its two halves of state, the plan of a step, the jitted steps, snapshots, and `Engine`."""

from dflash_jax.engine.admission import Prompt
from dflash_jax.engine.config import EngineConfig, EngineSetup
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.invariants import Violation
from dflash_jax.engine.output import Completion, Metrics, Update
from dflash_jax.engine.request import SamplingParams
from dflash_jax.engine.state import EngineState, Models

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineSetup",
    "EngineState",
    "Metrics",
    "Models",
    "Prompt",
    "SamplingParams",
    "Update",
    "Violation",
]
