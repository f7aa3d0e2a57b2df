"""`allowed_token_ids`: the only tokens that may be said."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from dflash_jax.engine.processors.block import Block
from dflash_jax.engine.processors.protocol import Processor
from dflash_jax.engine.request import Request
from dflash_jax.sampling.masks import ALL, WORD, set_tokens, unpack_mask


class AllowedTokens(Processor):
    """Forbids all tokens but some, which a mask of one bit a token holds."""

    parameters: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)

    mask: UInt32[Array, "rows words"]
    given: Bool[Array, " rows"]

    @classmethod
    def empty(cls, entries: int, vocab_size: int) -> AllowedTokens:
        """See `Processor`."""
        words: Any = np.full((entries, -(-vocab_size // WORD)), ALL, np.uint32)
        given: Any = np.zeros(entries, bool)
        return cls(words, given)

    def fill(self, entry: int, request: Request) -> None:
        """See `Processor`."""
        own: Any = self
        allowed = request.sampling.allowed_token_ids
        if allowed is None:
            return
        own.given[entry] = True
        own.mask[entry] = 0
        set_tokens(own.mask[entry], allowed, True)

    def wanted(self) -> Bool[Array, " rows"]:
        """See `Processor`."""
        return self.given

    def apply(self, logits: Float[Array, "rows positions vocab"], block: Block) -> Float[Array, "rows positions vocab"]:
        """See `Processor`."""
        return jnp.where(unpack_mask(self.mask, logits.shape[-1])[:, None], logits, -jnp.inf)
