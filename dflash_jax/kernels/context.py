"""Cached keys and values: pages, the way from a row to its own, and the ops that read and write them."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.block_attention import block_attention
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.packing import Packing
from dflash_jax.kernels.pages import write_tokens


class KeyValues(struct.PyTreeNode):
    """Keys and values of some tokens, all layers of one model."""

    k: Float[Array, "layers *tokens kv_heads head_dim"]
    v: Float[Array, "layers *tokens kv_heads head_dim"]


class Context(struct.PyTreeNode):
    """What the rows of a step may attend to.

    Attributes:
      pages: the model's page pool, [layers, pages, page_size, kv_heads, head_dim].
      block_table: physical page of each slot's logical page, -1 where there is none.
      idx_mapping: row to slot, -1 for an empty row.
      lengths: cached tokens per slot.
    """

    pages: KeyValues
    block_table: Int[Array, "slots slot_pages"]
    idx_mapping: Int[Array, " rows"]
    lengths: Int[Array, " slots"]

    def row_lengths(self) -> Int[Array, " rows"]:
        """Cached tokens per row; 0 for an empty row."""
        slots = jnp.maximum(self.idx_mapping, 0)
        return jnp.where(self.idx_mapping >= 0, self.lengths[slots], 0)

    def attend(
        self,
        layer: int,
        q: Float[Array, "rows queries heads head_dim"],
        k: Float[Array, "rows queries kv_heads head_dim"],
        v: Float[Array, "rows queries kv_heads head_dim"],
        q_len: Int[Array, " rows"],
        *,
        causal: bool,
        window: int | None,
        scale: float,
        implementation: Implementation | None = None,
    ) -> Float[Array, "rows queries heads head_dim"]:
        """New tokens' attention over their rows' contexts and over themselves; arguments as of `block_attention`."""
        return block_attention(
            q,
            k,
            v,
            self.pages.k,
            self.pages.v,
            self.block_table,
            self.idx_mapping,
            self.lengths,
            q_len,
            layer=layer,
            causal=causal,
            window=window,
            scale=scale,
            implementation=implementation,
        )

    def write(
        self,
        entries: KeyValues,
        count: Int[Array, " rows"],
        *,
        packing: Packing | None = None,
        implementation: Implementation | None = None,
    ) -> KeyValues:
        """The pool with the first `count` tokens of each row appended at the end of its context.

        Tokens past `count`, empty rows, and tokens whose page does not exist are dropped: nothing is
        ever written to a page that is not the row's own.

        Args:
          entries: of the rows' new tokens, dense or packed.
          count: how many of each row's tokens to keep.
          packing: of packed ones; None for dense ones.
          implementation: of the kernels; see `kernels.dispatch`.
        """
        num_pages, page_size = self.pages.k.shape[1:3]
        width = entries.k.shape[2] if packing is None else packing.place.shape[1]
        offsets = jnp.arange(width)
        positions = self.row_lengths()[:, None] + offsets
        logical = positions // page_size
        rows = self.block_table[jnp.maximum(self.idx_mapping, 0)]
        physical = jnp.take_along_axis(rows, jnp.minimum(logical, rows.shape[1] - 1), axis=1)
        keep = (offsets < count[:, None]) & (self.idx_mapping >= 0)[:, None]
        keep &= (physical >= 0) & (logical < rows.shape[1])
        # One past the end: such tokens are dropped.
        physical = jnp.where(keep, physical, num_pages)
        offset = positions % page_size
        if packing is not None:
            physical = jnp.where(packing.real, packing.pack(physical), num_pages)
            offset = packing.pack(offset)
        return KeyValues(
            k=write_tokens(self.pages.k, entries.k, physical, offset, implementation=implementation),
            v=write_tokens(self.pages.v, entries.v, physical, offset, implementation=implementation),
        )
