"""What a logits processor knows of the positions it is applied to."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

UNKNOWN = -1
"""A token that is not known: one that the draft has yet to propose."""


class Block(struct.PyTreeNode):
    """The tokens before each position of a block, one block a row.

    Position i decides the token that comes after the committed ones and after the first i drafted ones. The
    drafted ones count as if they were accepted: position i matters only if they are.

    Attributes:
      tokens: the committed tokens, prompt first, and the drafted ones right after them; what follows means nothing.
      length: how many are committed.
      prompt_len: how many of those are the prompt.
      drafts: the drafted tokens alone, `UNKNOWN` where they are to be proposed from what is processed.
      stop_tokens: the tokens that end the request, padded with -1.
    """

    tokens: Int[Array, "rows joined"]
    length: Int[Array, " rows"]
    prompt_len: Int[Array, " rows"]
    drafts: Int[Array, "rows drafts"]
    stop_tokens: Int[Array, "rows stop_tokens"]

    def output_len(self, positions: int) -> Int[Array, "rows positions"]:
        """Tokens of output before each position."""
        return (self.length - self.prompt_len)[:, None] + jnp.arange(positions)

    def before(self, positions: int, count: int) -> Int[Array, "rows positions count"]:
        """The last `count` tokens of output before each position, `UNKNOWN` where there are not so many."""
        at = self.length[:, None, None] + jnp.arange(positions)[:, None] + jnp.arange(-count, 0)
        rows = jnp.arange(self.length.shape[0])[:, None, None]
        tokens = self.tokens[rows, jnp.clip(at, 0, self.tokens.shape[1] - 1)]
        return jnp.where(at >= self.prompt_len[:, None, None], tokens, UNKNOWN)


def block_of(
    history: Int[Array, "rows length"],
    length: Int[Array, " rows"],
    prompt_len: Int[Array, " rows"],
    drafts: Int[Array, "rows drafts"],
    stop_tokens: Int[Array, "rows stop_tokens"],
) -> Block:
    """A block after so many committed tokens, which `history` begins with."""
    room = jnp.full(drafts.shape, UNKNOWN, history.dtype)
    rows, at = jnp.arange(length.shape[0])[:, None], length[:, None] + jnp.arange(drafts.shape[1])
    joined = jnp.concatenate([history, room], axis=1).at[rows, at].set(drafts.astype(history.dtype), mode="drop")
    return Block(joined, length, prompt_len, drafts, stop_tokens)
