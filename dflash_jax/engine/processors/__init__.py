"""Logits processors: what a request's parameters do to the target's logits before the temperature.

Each is one file with one class, whose instance is what it keeps for each slot. A new one is another such class, its
name in `PROCESSORS`, and its parameters in `SamplingParams`.
"""

from dflash_jax.engine.processors.block import UNKNOWN, Block
from dflash_jax.engine.processors.state import (
    PROCESSORS,
    Process,
    Processors,
    Room,
    empty_processors,
    processing,
    processor_entries,
    record_tokens,
)

__all__ = [
    "PROCESSORS",
    "UNKNOWN",
    "Block",
    "Process",
    "Processors",
    "Room",
    "empty_processors",
    "processing",
    "processor_entries",
    "record_tokens",
]
