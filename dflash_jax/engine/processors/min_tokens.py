"""`min_tokens`: no token that ends the request comes before so many others."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.engine.processors.block import Block
from dflash_jax.engine.processors.protocol import Processor
from dflash_jax.engine.request import Request


class MinTokens(Processor):
    """Forbids the request's stop tokens while the output is shorter than `count`."""

    parameters: ClassVar[tuple[str, ...]] = ("min_tokens",)

    count: Int[Array, " rows"]

    @classmethod
    def empty(cls, entries: int, vocab_size: int) -> MinTokens:
        """See `Processor`."""
        count: Any = np.zeros(entries, np.int32)
        return cls(count)

    def fill(self, entry: int, request: Request) -> None:
        """See `Processor`."""
        own: Any = self
        own.count[entry] = min(request.sampling.min_tokens, np.iinfo(np.int32).max)

    def wanted(self) -> Bool[Array, " rows"]:
        """See `Processor`."""
        return self.count > 0

    def apply(self, logits: Float[Array, "rows positions vocab"], block: Block) -> Float[Array, "rows positions vocab"]:
        """See `Processor`."""
        rows, positions, vocab_size = logits.shape
        early = block.output_len(positions) < self.count[:, None]
        stops = block.stop_tokens[:, None]
        forbidden = jnp.where(early[..., None] & (stops >= 0), stops, vocab_size)
        at = jnp.arange(rows)[:, None, None], jnp.arange(positions)[:, None], forbidden
        return logits.at[at].set(-jnp.inf, mode="drop")
