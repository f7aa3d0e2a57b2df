"""Repetition, presence and frequency penalties."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.engine.processors.block import Block
from dflash_jax.engine.processors.protocol import Processor
from dflash_jax.engine.request import Request

_LOWEST, _HIGHEST = 1e-30, 1e30
"""What a repetition penalty is on the device: float32 can neither divide nor multiply by what lies outside."""


class Penalties(Processor):
    """Makes tokens rarer that were said before, in the conventions of vLLM and of OpenAI.

    The repetition penalty divides positive logits of the tokens in prompt and output, and multiplies negative ones.
    The presence penalty is subtracted from the logits of tokens in the output, the frequency penalty once for each
    time that they are in it.
    """

    parameters: ClassVar[tuple[str, ...]] = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    repetition: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]

    @classmethod
    def empty(cls, entries: int, vocab_size: int) -> Penalties:
        """See `Processor`."""
        ones: Any = np.ones(entries, np.float32)
        return cls(repetition=ones, presence=0 * ones, frequency=0 * ones)

    def fill(self, entry: int, request: Request) -> None:
        """See `Processor`."""
        sampling: Any = request.sampling
        own: Any = self
        own.repetition[entry] = min(max(sampling.repetition_penalty, _LOWEST), _HIGHEST)
        own.presence[entry], own.frequency[entry] = sampling.presence_penalty, sampling.frequency_penalty

    def wanted(self) -> Bool[Array, " rows"]:
        """See `Processor`."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)

    def apply(self, logits: Float[Array, "rows positions vocab"], block: Block) -> Float[Array, "rows positions vocab"]:
        """See `Processor`."""
        said = output_counts(block, *logits.shape[1:])
        seen = _in_prompt(block, logits.shape[-1])[:, None] | (said > 0)
        repetition, presence, frequency = (
            each[:, None, None] for each in (self.repetition, self.presence, self.frequency)
        )
        changed = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
        changed -= said * frequency + (said > 0) * presence
        # At the ends of float32's range a penalty must not turn a number into none. Damage stays visible.
        largest = jnp.finfo(jnp.float32).max
        return jnp.where(jnp.isfinite(logits), jnp.clip(changed, -largest, largest), logits)


def output_counts(block: Block, positions: int, vocab_size: int) -> Int[Array, "rows positions vocab"]:
    """How often each token is in the output before each position."""
    at, rows = jnp.arange(block.tokens.shape[1]), jnp.arange(block.length.shape[0])
    output = (at >= block.prompt_len[:, None]) & (at < block.length[:, None])
    # One past the end: a scatter in "drop" mode leaves such tokens out.
    committed = jnp.where(output, block.tokens, vocab_size)
    counts = jnp.zeros((rows.size, vocab_size), jnp.int32).at[rows[:, None], committed].add(1, mode="drop")
    counts = jnp.broadcast_to(counts[:, None], (rows.size, positions, vocab_size))
    earlier = jnp.arange(block.drafts.shape[1]) < jnp.arange(positions)[:, None]
    drafts = block.drafts[:, None]
    drafted = jnp.where(earlier & (drafts >= 0), drafts, vocab_size)
    return counts.at[rows[:, None, None], jnp.arange(positions)[:, None], drafted].add(1, mode="drop")


def _in_prompt(block: Block, vocab_size: int) -> Bool[Array, "rows vocab"]:
    rows = jnp.arange(block.length.shape[0])
    prompt = jnp.arange(block.tokens.shape[1]) < block.prompt_len[:, None]
    nothing = jnp.zeros((rows.size, vocab_size), bool)
    return nothing.at[rows[:, None], jnp.where(prompt, block.tokens, vocab_size)].set(True, mode="drop")
