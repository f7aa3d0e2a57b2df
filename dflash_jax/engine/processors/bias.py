"""`logit_bias`: numbers that are added to some tokens' logits."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.engine.parameters import MAX_LOGIT_BIAS
from dflash_jax.engine.processors.block import Block
from dflash_jax.engine.processors.protocol import Processor
from dflash_jax.engine.request import Request


class LogitBias(Processor):
    """Adds to some tokens' logits. The list of tokens is padded with -1."""

    parameters: ClassVar[tuple[str, ...]] = ("logit_bias",)

    tokens: Int[Array, "rows biased"]
    values: Float[Array, "rows biased"]

    @classmethod
    def empty(cls, entries: int, vocab_size: int) -> LogitBias:
        """See `Processor`."""
        count = min(MAX_LOGIT_BIAS, vocab_size)
        fields: dict[str, Any] = dict(
            tokens=np.full((entries, count), -1, np.int32), values=np.zeros((entries, count), np.float32)
        )
        return cls(**fields)

    def fill(self, entry: int, request: Request) -> None:
        """See `Processor`."""
        own: Any = self
        for at, (token, value) in enumerate(request.sampling.biases):
            own.tokens[entry, at], own.values[entry, at] = token, value

    def wanted(self) -> Bool[Array, " rows"]:
        """See `Processor`."""
        return self.tokens[:, 0] >= 0

    def apply(self, logits: Float[Array, "rows positions vocab"], block: Block) -> Float[Array, "rows positions vocab"]:
        """See `Processor`."""
        rows, _, vocab_size = logits.shape
        bias = jnp.zeros((rows, vocab_size), jnp.float32)
        at = jnp.where(self.tokens >= 0, self.tokens, vocab_size)
        return logits + bias.at[jnp.arange(rows)[:, None], at].set(self.values, mode="drop")[:, None]
