"""`block_attention` for Hopper GPUs, in Pallas' Mosaic GPU dialect.

One CTA of one warpgroup computes a row, a KV head, a tile of 64 query rows (a query times the heads
of its group) and a share of the context. It looks its slot up in `idx_mapping`, walks the slot's
block table, and streams keys and values through shared memory by TMA while tensor cores work on what
has arrived. Softmax is online, in base 2. Shares of one row are summed by a second, plain XLA step.

The block's own tokens are a last tile or tiles after the context's, taken from the dense inputs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import mosaic
from dflash_jax.kernels.block_attention.mosaic_gpu_kernel import kernel
from dflash_jax.kernels.block_attention.mosaic_gpu_tiles import ROWS, Plan

_MULTIPROCESSORS = 132
"""Of an H100 or H200."""


def unsupported(
    q: Float[Array, "rows queries heads head_dim"],
    k_block: Float[Array, "rows queries kv_heads head_dim"],
    v_block: Float[Array, "rows queries kv_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
) -> str | None:
    """Why these shapes cannot be computed here, or None if they can."""
    head_dim, page_size = q.shape[-1], k_pages.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or {q.dtype, k_block.dtype, k_pages.dtype} != {q.dtype}:
        return f"queries {q.dtype}, keys {k_block.dtype} and pages {k_pages.dtype} are not all bfloat16 or all float32"
    if head_dim % 16 or head_dim > 256 or (head_dim > 128 and head_dim % 64):
        return f"head_dim {head_dim} is neither a multiple of 16 up to 128 nor 192 or 256"
    if page_size % 8:
        return f"page_size {page_size} is not a multiple of 8"
    return None


def block_attention(
    q: Float[Array, "rows queries heads head_dim"],
    k_block: Float[Array, "rows queries kv_heads head_dim"],
    v_block: Float[Array, "rows queries kv_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    block_table: Int[Array, "slots slot_pages"],
    idx_mapping: Int[Array, " rows"],
    context_len: Int[Array, " slots"],
    q_len: Int[Array, " rows"],
    *,
    layer: int,
    causal: bool,
    window: int | None,
    scale: float,
    splits: int | None = None,
) -> Float[Array, "rows queries heads head_dim"]:
    """See `api.block_attention`; `splits` overrides into how many shares the context is cut."""
    rows, queries, heads, head_dim = q.shape
    num_pages, page_size, kv_heads = k_pages.shape[1:4]
    group = heads // kv_heads
    query_tiles = pl.cdiv(queries * group, ROWS)
    tile_rows = ROWS if query_tiles > 1 else _up(queries * group, 8)
    single = q.dtype == jnp.bfloat16
    tokens = 128 if single and head_dim <= 64 else 64
    # By their shared memory, two CTAs of the smaller kind fit one multiprocessor.
    concurrent = _MULTIPROCESSORS * (2 if single and head_dim <= 128 else 1)
    reach = block_table.shape[1] * page_size if window is None else window + queries
    plan = Plan(
        rows=rows,
        queries=queries,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        layer=layer,
        num_pages=num_pages,
        page_size=page_size,
        causal=causal,
        window=window,
        scale=scale,
        tokens=tokens,
        piece=math.gcd(tokens, page_size),
        stages=2 if single else 1,
        terms=1 if single else 3,
        padded_block=_up(queries, 8 if queries <= tokens else tokens),
        query_tiles=query_tiles,
        tile_rows=tile_rows,
        splits=splits or _splits(rows * kv_heads * query_tiles, pl.cdiv(reach, tokens), concurrent),
    )
    partial, statistics = _launch(plan)(
        _query_rows(q, plan),
        *(_padded(x, plan) for x in (k_block, v_block)),
        # Leading dimensions merge without moving anything: the pools are read where they are.
        *(x.reshape(-1, kv_heads * head_dim) for x in (k_pages, v_pages)),
        block_table,
        idx_mapping,
        context_len,
        q_len,
    )
    live = (idx_mapping >= 0)[:, None] & (jnp.arange(queries) < q_len[:, None])
    return jnp.where(live[..., None, None], _combine(partial, statistics, plan), 0).astype(q.dtype)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _splits(ctas: int, tiles: int, concurrent: int) -> int:
    """The fewest shares per context that keep the GPU's last wave of `concurrent` CTAs nearly full."""
    for splits in range(1, tiles + 1):
        waves = ctas * splits / concurrent
        if waves >= 0.85 * math.ceil(waves):
            return splits
    return max(tiles, 1)


def _query_rows(q: Float[Array, "rows queries heads head_dim"], plan: Plan) -> Array:
    """[terms * rows * kv_heads * query rows, head_dim]: the queries of one KV head together, padded."""
    x = q.reshape(plan.rows, plan.queries, plan.kv_heads, plan.group, plan.head_dim).transpose(0, 2, 1, 3, 4)
    x = x.reshape(plan.rows, plan.kv_heads, -1, plan.head_dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.query_tiles * plan.tile_rows - x.shape[2]), (0, 0)))
    return mosaic.as_terms(x.reshape(-1, plan.head_dim), plan.terms).reshape(-1, plan.head_dim)


def _padded(x: Float[Array, "rows queries kv_heads head_dim"], plan: Plan) -> Array:
    x = jnp.pad(x, ((0, 0), (0, plan.padded_block - plan.queries), (0, 0), (0, 0)))
    return x.reshape(-1, plan.kv_heads * plan.head_dim)


def _combine(partial: Array, statistics: Array, plan: Plan) -> Float[Array, "rows queries heads head_dim"]:
    """Sums the shares of each query, weighted by what each saw of the softmax's denominator."""
    shape = (plan.rows, plan.kv_heads, plan.splits, plan.query_tiles)
    partial = partial.reshape(*shape, plan.tile_rows, plan.head_dim)
    top, total = jnp.moveaxis(statistics.reshape(*shape, 2, ROWS)[..., : plan.tile_rows], -2, 0)
    # A share without keys wrote no sum, only that its total is 0: what lies there is not to be touched.
    seen = total > 0
    weight = jnp.where(seen, jnp.exp2(top - top.max(2, keepdims=True)), 0)
    total = (weight * total).sum(2)
    mixed = jnp.where(seen[..., None], weight[..., None] * partial, 0).sum(2)
    mixed = mixed / jnp.where(total > 0, total, 1)[..., None]
    mixed = mixed.reshape(plan.rows, plan.kv_heads, -1, plan.head_dim)[:, :, : plan.queries * plan.group]
    mixed = mixed.reshape(plan.rows, plan.kv_heads, plan.queries, plan.group, plan.head_dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(plan.rows, plan.queries, -1, plan.head_dim)


def _launch(plan: Plan):
    source = jnp.bfloat16 if plan.terms == 1 else jnp.float32
    ctas = plan.rows * plan.kv_heads * plan.splits * plan.query_tiles
    columns = min(plan.head_dim, 64)
    matrix = mosaic.tile(plan.head_dim, jnp.bfloat16)
    stored = plgpu.SMEM(
        (plan.stages, plan.tokens, plan.head_dim), source, transforms=mosaic.tile(plan.head_dim, source)
    )
    loaded = plgpu.Barrier(num_arrivals=plan.tokens // plan.piece, num_barriers=plan.stages)
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((plan.terms, ROWS, plan.head_dim), jnp.bfloat16, transforms=matrix),
        "q_loaded": plgpu.Barrier(num_arrivals=plan.terms),
        "k_smem": stored,
        "k_loaded": loaded,
        "v_loaded": loaded,
        "sums": plgpu.SMEM((ROWS, columns), jnp.float32, transforms=mosaic.tile(columns, jnp.float32)),
        "statistics": plgpu.SMEM((2, ROWS), jnp.float32),
    }
    if plan.terms == 1:
        scratch["v_smem"] = stored
    else:
        scratch["term"] = plgpu.SMEM((plan.tokens, plan.head_dim), jnp.bfloat16, transforms=matrix)
    return plgpu.kernel(
        functools.partial(kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((ctas * plan.tile_rows, plan.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((ctas, 2, ROWS), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(plan.rows, plan.kv_heads, plan.splits, plan.query_tiles),
        grid_names=("row", "kv_head", "split", "query_tile"),
        kernel_name="block_attention",
        compiler_params=plgpu.CompilerParams(approx_math=plan.terms == 1),
    )
