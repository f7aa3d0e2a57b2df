"""Which keys a CTA of the Pallas kernel goes through, and the copies that bring them to it."""

from __future__ import annotations

import dataclasses

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

ROWS = 64
"""Query rows of a CTA: what one warpgroup's matrix instruction takes."""

_SLAB = 128
"""Columns accumulated together, so that head_dim 256 fits the registers."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shape of one launch.

    Attributes:
      tokens: keys of a tile.
      piece: tokens of one copy: the most that divide both a tile and a page.
      stages: tiles in flight.
      terms: bfloat16 numbers that one input number is the sum of: 1, or 3 for float32.
      padded_block: new tokens per row as stored, padded for TMA.
      query_tiles, tile_rows: tiles of query rows, and the rows of each that exist.
      splits: shares of the context.
    """

    rows: int
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    layer: int
    num_pages: int
    page_size: int
    causal: bool
    window: int | None
    scale: float
    tokens: int
    piece: int
    stages: int
    terms: int
    padded_block: int
    query_tiles: int
    tile_rows: int
    splits: int

    @property
    def slabs(self) -> list[tuple[int, int]]:
        """Start and width of the column ranges of head_dim that are accumulated together."""
        return [(start, min(_SLAB, self.head_dim - start)) for start in range(0, self.head_dim, _SLAB)]


@dataclasses.dataclass(frozen=True)
class Work:
    """The keys of one CTA: tiles of pages, then tiles of the block. All traced scalars.

    Attributes:
      slot, context, new: the row's slot, its cached tokens and its new ones; the latter two are 0 for
        an empty row and for queries that are all padding.
      first_tile, page_tiles: tiles of pages.
      first_block_tile: of the block's tiles, which follow.
      tiles: all tiles.
      first_query, last_query: offsets of the CTA's queries in the block.
    """

    slot: Int[Array, ""]
    context: Int[Array, ""]
    new: Int[Array, ""]
    first_tile: Int[Array, ""]
    page_tiles: Int[Array, ""]
    first_block_tile: Int[Array, ""]
    tiles: Int[Array, ""]
    first_query: Int[Array, ""]
    last_query: Int[Array, ""]


def work_of_cta(plan: Plan, idx_mapping, context_len, q_len) -> Work:
    """Resolves the row to its slot, and cuts what its queries may see into tiles and shares.

    Args:
      plan: the launch.
      idx_mapping, context_len, q_len: references to global memory.
    """
    row, split, query_tile = (lax.axis_index(name) for name in ("row", "split", "query_tile"))
    mapped = idx_mapping[row]
    slot = jnp.maximum(mapped, 0)
    first_query = lax.div(query_tile * ROWS, plan.group)
    last_query = jnp.minimum(lax.div(query_tile * ROWS + ROWS - 1, plan.group), plan.queries - 1)
    idle = (mapped < 0) | (first_query >= q_len[row])
    context = jnp.where(idle, 0, context_len[slot])
    new = jnp.where(idle, 0, q_len[row])

    # Positions relative to the block: what is behind the first query's window is in no tile.
    reach = None if plan.window is None else first_query - plan.window + 1
    first = jnp.int32(0) if reach is None else lax.div(jnp.maximum(context + reach, 0), plan.tokens)
    count = jnp.maximum(_tiles_to(context, plan) - first, 0)
    share = lax.div(count + (plan.splits - 1), plan.splits)
    begin = first + split * share
    page_tiles = jnp.clip(first + count - begin, 0, share)

    past = new
    if plan.causal:
        past = jnp.minimum(new, last_query + 1)
    elif plan.window is not None:
        past = jnp.minimum(new, last_query + plan.window)
    first_block = jnp.int32(0) if reach is None else lax.div(jnp.maximum(reach, 0), plan.tokens)
    # The last share is never longer than the others, so it takes the block too.
    block_tiles = jnp.where(split == plan.splits - 1, jnp.maximum(_tiles_to(past, plan) - first_block, 0), 0)
    return Work(
        slot=slot,
        context=context,
        new=new,
        first_tile=begin,
        page_tiles=page_tiles,
        first_block_tile=first_block,
        tiles=page_tiles + block_tiles,
        first_query=first_query,
        last_query=last_query,
    )


def _tiles_to(position: Int[Array, ""], plan: Plan) -> Int[Array, ""]:
    return lax.div(position + (plan.tokens - 1), plan.tokens)


class Loader:
    """Starts copies of tiles of keys, or of values, to shared memory."""

    def __init__(self, plan: Plan, work: Work, pool, block, block_table, buffer, loaded):
        """Takes the pages and the block's own tokens, a buffer per stage, and the barriers that say it is full."""
        self.plan, self.work = plan, work
        self.pool, self.block, self.block_table = pool, block, block_table
        self.buffer, self.loaded = buffer, loaded
        self.head = pl.ds(lax.axis_index("kv_head") * plan.head_dim, plan.head_dim)

    def __call__(self, tile: Int[Array, ""]) -> None:
        """Starts copying a tile to its stage; nothing if there are not that many tiles."""
        pl.when(tile < self.work.page_tiles)(lambda: self._pages(tile))
        pl.when((tile >= self.work.page_tiles) & (tile < self.work.tiles))(lambda: self._block(tile))

    def _pages(self, tile: Int[Array, ""]) -> None:
        plan, work = self.plan, self.work
        stage = lax.rem(tile, plan.stages)
        for start in range(0, plan.tokens, plan.piece):
            token = (work.first_tile + tile) * plan.tokens + start
            # What a tile has past the end of the context is filled from the context's last page: the
            # barrier counts whole tiles, and no page but the slot's own may be touched.
            logical = lax.div(jnp.minimum(token, work.context - 1), plan.page_size)
            page = jnp.clip(self.block_table[work.slot, logical], 0, plan.num_pages - 1)
            source = (plan.layer * plan.num_pages + page) * plan.page_size + lax.rem(token, plan.page_size)
            self._copy(self.pool, source, stage, start, plan.piece)

    def _block(self, tile: Int[Array, ""]) -> None:
        plan, work = self.plan, self.work
        stage = lax.rem(tile, plan.stages)
        source = lax.axis_index("row") * plan.padded_block
        source += (work.first_block_tile + tile - work.page_tiles) * plan.tokens
        self._copy(self.block, source, stage, 0, min(plan.tokens, plan.padded_block))
        # The barrier waits for as many arrivals as a tile of pages has copies.
        for _ in range(plan.tokens // plan.piece - 1):
            plgpu.barrier_arrive(self.loaded.at[stage])

    def _copy(self, source_ref, source, stage, start: int, length: int) -> None:
        plgpu.copy_gmem_to_smem(
            source_ref.at[pl.ds(source, length), self.head],
            self.buffer.at[stage, pl.ds(start, length)],
            self.loaded.at[stage],
        )
