"""The body of the Pallas kernel: what one CTA computes. `mosaic_gpu.py` launches it."""

from __future__ import annotations

import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.kernels import mosaic
from dflash_jax.kernels.block_attention.mosaic_gpu_tiles import ROWS, Loader, Plan, Work, work_of_cta

_FLOOR = -1e20
"""Running maximum of a query that has seen no key; so far above a masked score that exp2 is 0."""

_MASKED = -1e30


def kernel(
    q,
    k_block,
    v_block,
    k_pages,
    v_pages,
    block_table,
    idx_mapping,
    context_len,
    q_len,
    sums_out,
    statistics_out,
    *,
    plan: Plan,
    q_smem,
    q_loaded,
    k_smem,
    k_loaded,
    v_loaded,
    sums,
    statistics,
    v_smem=None,
    term=None,
) -> None:
    """One row, KV head, share of the context and tile of query rows.

    Args:
      q: [terms * rows * kv_heads * query rows, head_dim].
      k_block, v_block: [rows * padded_block, kv_heads * head_dim].
      k_pages, v_pages: [layers * pages * page_size, kv_heads * head_dim].
      block_table, idx_mapping, context_len, q_len: see `api.block_attention`.
      sums_out: [CTAs * tile_rows, head_dim]: values summed with the softmax's numerators.
      statistics_out: [CTAs, 2, ROWS]: the maximum score, in base 2, and the sum of the numerators.
      plan: the launch.
      q_smem, ...: shared memory and barriers, see `mosaic_gpu._launch`. Without v_smem keys and values
        take turns in k_smem; term then holds one bfloat16 term of what is there.
    """
    work = work_of_cta(plan, idx_mapping, context_len, q_len)
    in_turns = v_smem is None
    v_smem = k_smem if in_turns else v_smem
    load_k = Loader(plan, work, k_pages, k_block, block_table, k_smem, k_loaded)
    load_v = Loader(plan, work, v_pages, v_block, block_table, v_smem, v_loaded)
    query_tile = lax.axis_index("query_tile")
    row_and_head = lax.axis_index("row") * plan.kv_heads + lax.axis_index("kv_head")
    query_rows = (row_and_head * plan.query_tiles + query_tile) * plan.tile_rows
    cta = (row_and_head * plan.splits + lax.axis_index("split")) * plan.query_tiles + query_tile

    per_row = plgpu.Layout.WGMMA.reduce(1)
    query = mosaic.with_layout(lax.broadcasted_iota(jnp.int32, (ROWS,), 0), per_row)
    query = lax.div(query + query_tile * ROWS, plan.group)

    def step(tile, carry):
        top, total, mixed = carry
        stage = lax.rem(tile, plan.stages)
        base, limit = _extent(tile, plan, work)

        plgpu.barrier_wait(k_loaded.at[stage])
        scores = _scores(q_smem, k_smem.at[stage], term, plan)
        if in_turns:
            load_v(tile)
        else:
            load_k(tile + plan.stages)
        scores = lax.cond(
            _cuts(base, limit, plan, work),
            lambda s: jnp.where(_seen(query, base, limit, plan), s, _MASKED),
            lambda s: s,
            scores,
        )
        base_two = plan.scale * math.log2(math.e)
        new_top = jnp.maximum(top, scores.max(axis=1) * base_two)
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * base_two - _across(new_top, scores.shape))
        total = total * shrink + weights.sum(axis=1)
        mixed = tuple(x * _across(shrink, x.shape) for x in mixed)

        plgpu.barrier_wait(v_loaded.at[stage])
        mixed = _mix(mixed, weights, v_smem.at[stage], term, limit - base, plan)
        if in_turns:
            load_k(tile + 1)
        else:
            load_v(tile + plan.stages)
        return new_top, total, mixed

    def write_statistics(top, total):
        statistics[0, :] = top
        statistics[1, :] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(statistics, statistics_out.at[cta])
        plgpu.wait_smem_to_gmem(0)

    nothing = tuple(mosaic.with_layout(jnp.full((ROWS,), value, jnp.float32), per_row) for value in (_FLOOR, 0))

    @pl.when(work.tiles == 0)
    def _():
        write_statistics(*nothing)

    @pl.when(work.tiles > 0)
    def _():
        for index in range(plan.terms):
            source = index * plan.rows * plan.kv_heads * plan.query_tiles * plan.tile_rows + query_rows
            plgpu.copy_gmem_to_smem(
                q.at[pl.ds(source, plan.tile_rows)], q_smem.at[index, pl.ds(0, plan.tile_rows)], q_loaded
            )
        for tile in range(plan.stages):
            load_k(jnp.int32(tile))
            if not in_turns:
                load_v(jnp.int32(tile))
        plgpu.barrier_wait(q_loaded)
        zeros = tuple(_zeros((ROWS, width)) for _, width in plan.slabs)
        top, total, mixed = lax.fori_loop(0, work.tiles, step, (*nothing, zeros))
        write_statistics(top, total)
        _write_sums(mixed, sums, sums_out, cta * plan.tile_rows, plan)


def _extent(tile: Int[Array, ""], plan: Plan, work: Work) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Where a tile's keys begin, and where keys of its kind end, as positions relative to the block."""
    in_pages = tile < work.page_tiles
    page_base = (work.first_tile + tile) * plan.tokens - work.context
    block_base = (work.first_block_tile + tile - work.page_tiles) * plan.tokens
    return jnp.where(in_pages, page_base, block_base), jnp.where(in_pages, 0, work.new)


def _cuts(base: Int[Array, ""], limit: Int[Array, ""], plan: Plan, work: Work) -> Bool[Array, ""]:
    """Whether some query does not see some key of the tile."""
    end = base + plan.tokens
    cut = end > limit
    if plan.causal:
        cut |= end - 1 > work.first_query
    if plan.window is not None:
        cut |= work.last_query - base >= plan.window
        if not plan.causal:
            cut |= end - 1 - work.first_query >= plan.window
    return cut


def _seen(query: Int[Array, " rows"], base: Int[Array, ""], limit: Int[Array, ""], plan: Plan):
    """Which keys of a tile each query row sees."""
    shape = (ROWS, plan.tokens)
    key = base + mosaic.with_layout(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA)
    distance = _across(query, shape) - key
    seen = key < limit
    if plan.causal:
        seen &= distance >= 0
    if plan.window is not None:
        seen &= distance < plan.window
        if not plan.causal:
            seen &= distance > -plan.window
    return seen


def _scores(q_smem, keys, term, plan: Plan) -> Float[Array, "rows tokens"]:
    shape = (ROWS, plan.tokens)
    if plan.terms == 1:
        return mosaic.scores([(q_smem.at[0], keys)], shape)
    scores = _zeros(shape)
    for index in range(plan.terms):
        _write_term(term, keys, index, plan.tokens, plan)
        # Products of two small terms are below float32's last digit.
        scores += mosaic.scores([(q_smem.at[other], term) for other in range(plan.terms - index)], shape)
    return scores


def _mix(mixed, weights: Float[Array, "rows tokens"], values, term, count: Int[Array, ""], plan: Plan):
    """mixed + weights @ values, slab by slab, of which the first `count` rows exist."""
    if plan.terms == 1:
        # A weight of 0 does not make a NaN harmless.
        pl.when(count < plan.tokens)(lambda: _zero_past(values, count, plan))
        short = weights.astype(jnp.bfloat16)
        return tuple(
            mosaic.accumulate(x, [(short, values.at[:, pl.ds(start, width)])])
            for x, (start, width) in zip(mixed, plan.slabs, strict=True)
        )
    terms = mosaic.terms(weights, plan.terms)
    for index in range(plan.terms):
        _write_term(term, values, index, count, plan)
        mixed = tuple(
            mosaic.accumulate(x, [(t, term.at[:, pl.ds(start, width)]) for t in terms[: plan.terms - index]])
            for x, (start, width) in zip(mixed, plan.slabs, strict=True)
        )
    return mixed


def _zero_past(matrix, count: Int[Array, ""], plan: Plan) -> None:
    for start, width in plan.slabs:
        slab = pl.ds(start, width)
        matrix[:, slab] = _rows_below(count, matrix[:, slab])
    plgpu.commit_smem()


def _write_term(term, source, index: int, count: Int[Array, ""] | int, plan: Plan) -> None:
    """Writes the index-th term of a float32 tile, rows from `count` on as zeros."""
    for start, width in plan.slabs:
        slab = pl.ds(start, width)
        term[:, slab] = mosaic.terms(_rows_below(count, source[:, slab]), index + 1)[index]
    plgpu.commit_smem()


def _write_sums(mixed, sums, sums_out, row: Int[Array, ""], plan: Plan) -> None:
    step = sums.shape[1]
    for x, (start, width) in zip(mixed, plan.slabs, strict=True):
        for column in range(0, width, step):
            sums[...] = x[:, column : column + step]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                sums.at[pl.ds(0, plan.tile_rows)],
                sums_out.at[pl.ds(row, plan.tile_rows), pl.ds(start + column, step)],
            )
            plgpu.wait_smem_to_gmem(0)


def _across(x: Array, shape: tuple[int, int]) -> Array:
    return lax.broadcast_in_dim(x, shape, (0,))


def _zeros(shape: tuple[int, int]) -> Float[Array, "rows columns"]:
    return mosaic.with_layout(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _rows_below(count: Int[Array, ""] | int, x: Array) -> Array:
    row = mosaic.with_layout(lax.broadcasted_iota(jnp.int32, x.shape, 0), plgpu.Layout.WGMMA)
    return jnp.where(row < count, x, jnp.zeros((), x.dtype))
