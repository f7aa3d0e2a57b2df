"""`bad_words`: sequences of tokens that must not be said."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.engine.parameters import MAX_BAD_WORDS
from dflash_jax.engine.processors.block import Block
from dflash_jax.engine.processors.protocol import Processor
from dflash_jax.engine.request import Request

MAX_SEQUENCES = 2 * MAX_BAD_WORDS
"""Sequences of tokens: a word with and without a space before it."""

MAX_LENGTH = 16
"""Tokens of the longest one."""


class BadWords(Processor):
    """Forbids the last token of a sequence where the output ends with the others.

    Sequences end in the last column; -1 stands before them, and for sequences that are none.
    """

    parameters: ClassVar[tuple[str, ...]] = ("bad_words",)

    sequences: Int[Array, "rows sequences length"]

    @classmethod
    def empty(cls, entries: int, vocab_size: int) -> BadWords:
        """See `Processor`."""
        nothing: Any = np.full((entries, MAX_SEQUENCES, MAX_LENGTH), -1, np.int32)
        return cls(nothing)

    def fill(self, entry: int, request: Request) -> None:
        """See `Processor`."""
        own: Any = self
        for at, tokens in enumerate(request.bad_words):
            own.sequences[entry, at, MAX_LENGTH - len(tokens) :] = tokens

    def wanted(self) -> Bool[Array, " rows"]:
        """See `Processor`."""
        return self.sequences[:, 0, -1] >= 0

    def apply(self, logits: Float[Array, "rows positions vocab"], block: Block) -> Float[Array, "rows positions vocab"]:
        """See `Processor`."""
        rows, positions, vocab_size = logits.shape
        before = block.before(positions, MAX_LENGTH - 1)[:, :, None]
        beginning, last = self.sequences[:, None, :, :-1], self.sequences[:, None, :, -1]
        complete = jnp.all((beginning < 0) | (beginning == before), axis=-1) & (last >= 0)
        # One past the end: a scatter in "drop" mode leaves such tokens out.
        forbidden = jnp.where(complete, last, vocab_size)
        at = jnp.arange(rows)[:, None, None], jnp.arange(positions)[:, None], forbidden
        return logits.at[at].set(-jnp.inf, mode="drop")
