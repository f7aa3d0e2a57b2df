"""Rows of different lengths, one behind the other: T tokens in the place of rows x width."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped


class Packing(struct.PyTreeNode):
    """Where each token of a dense batch [rows, width] lies among T packed ones, and back.

    A packed array has the shape [1, tokens, ...], a dense one [rows, width, ...]. What works token by token takes
    either; what works row by row (attention, recurrent states) takes dense ones, whose padding it passes over.

    Attributes:
      source: of each packed token, `row * width + offset` in the dense batch; 0 where there is none.
      place: of each token of the dense batch, its place among the packed ones; 0 where it is not among them.
      real: which packed tokens there are.
    """

    source: Int[Array, " tokens"]
    place: Int[Array, "rows width"]
    real: Bool[Array, " tokens"]

    def pack(self, dense: Shaped[Array, "rows width *rest"]) -> Shaped[Array, "1 tokens *rest"]:
        """The tokens one behind the other; those that are not real repeat another."""
        return dense.reshape(-1, *dense.shape[2:])[self.source][None]

    def unpack(self, packed: Shaped[Array, "1 tokens *rest"]) -> Shaped[Array, "rows width *rest"]:
        """The tokens in their rows; padding repeats another."""
        return packed[0][self.place]


def pack(dense: Shaped[Array, "rows width *rest"], packing: Packing | None) -> Shaped[Array, "batch tokens *rest"]:
    """A dense array packed; itself where nothing is."""
    return dense if packing is None else packing.pack(dense)


def unpack(packed: Shaped[Array, "batch tokens *rest"], packing: Packing | None) -> Shaped[Array, "rows width *rest"]:
    """A packed array as a dense one; itself where nothing is packed."""
    return packed if packing is None else packing.unpack(packed)


def packing_of(q_len: Int[Array, " rows"], width: int, tokens: int) -> Packing:
    """The packing of rows that have `q_len` tokens each.

    Args:
      q_len: 0..width; together at most `tokens`.
      width: of the dense batch.
      tokens: T, of the packed one.
    """
    start = jnp.cumsum(q_len) - q_len
    offsets = jnp.arange(width)
    kept = offsets < q_len[:, None]
    place = jnp.where(kept, start[:, None] + offsets, 0)
    dense = jnp.arange(q_len.shape[0] * width)
    # One past the end: such tokens are dropped.
    source = jnp.zeros(tokens, jnp.int32).at[jnp.where(kept, place, tokens).reshape(-1)].set(dense, mode="drop")
    return Packing(source, place, jnp.arange(tokens) < q_len.sum())
