"""The engine: its two halves of state, the plan of a step, the jitted steps, snapshots, and `Engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_jax.lazy import lazy_exports

if TYPE_CHECKING:
    from dflash_jax.engine.config import EngineConfig, EngineSetup
    from dflash_jax.engine.engine import Engine
    from dflash_jax.engine.invariants import Violation
    from dflash_jax.engine.logprob_records import TokenLogprob, TopLogprob
    from dflash_jax.engine.output import Completion, Metrics, Update
    from dflash_jax.engine.prompts import Prompt, Prompts
    from dflash_jax.engine.request import SamplingParams, sample_id, samples_of
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
    "Prompts",
    "SamplingParams",
    "TokenLogprob",
    "TopLogprob",
    "Update",
    "Violation",
    "sample_id",
    "samples_of",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "config": ["EngineConfig", "EngineSetup"],
        "engine": ["Engine"],
        "invariants": ["Violation"],
        "logprob_records": ["TokenLogprob", "TopLogprob"],
        "output": ["Completion", "Metrics", "Update"],
        "prompts": ["Prompt", "Prompts"],
        "request": ["SamplingParams", "sample_id", "samples_of"],
        "state": ["EngineState", "Models"],
    },
)
