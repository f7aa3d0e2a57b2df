"""`best_tokens` for Hopper GPUs, in Pallas' Mosaic GPU dialect: logits stay in registers.

One CTA of one warpgroup multiplies up to 128 rows of hidden states by a share of the vocabulary, a
tile of tokens at a time, and keeps each row's best tokens. The shares' best are few, and plain XLA
picks the best of those. `mosaic_gpu_kernel.py` has what one CTA computes.
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
from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.lm_head.mosaic_gpu_kernel import DEPTH, ROWS, Plan, kernel
from dflash_jax.kernels.matmul import Layout

_CONCURRENT = 264
"""CTAs that an H100 or H200 runs at a time: by their shared memory, two on each of 132 multiprocessors."""

_MOST_ROWS = 512
"""Beyond these the head is read so often, once for 128 rows, that XLA's larger tiles are the better product."""


def unsupported(
    hidden: Float[Array, "*batch hidden"], weight: Float[Array, "rows columns"] | Compact, layout: Layout, top_k: int
) -> str | None:
    """Why these shapes cannot be computed here, or None if they can."""
    vocab, depth = weight.shape if layout == "out_in" else weight.shape[::-1]
    rows = math.prod(hidden.shape[:-1])
    if isinstance(weight, Compact):
        return f"the head is kept as {weight.format}"
    if weight.dtype not in (jnp.bfloat16, jnp.float32) or hidden.dtype != weight.dtype:
        return f"hidden states {hidden.dtype} and head {weight.dtype} are not both bfloat16 or both float32"
    if depth % DEPTH:
        return f"hidden size {depth} is not a multiple of {DEPTH}"
    if vocab < 64 or vocab % 8:
        return f"vocabulary {vocab} is not a multiple of 8 from 64 on"
    if top_k > 16:
        return f"top_k {top_k} is more than 16"
    if not 0 < rows <= _MOST_ROWS:
        return f"{rows} rows are not from 1 to {_MOST_ROWS}"
    return None


def best_tokens(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "rows columns"],
    *,
    layout: Layout,
    top_k: int,
    multiplier: float,
    softcap: float | None,
    shares: int | None = None,
) -> tuple[Float[Array, "*batch best"], Int[Array, "*batch best"]]:
    """See `api.best_tokens`; `shares` overrides into how many the vocabulary is cut."""
    batch, depth = hidden.shape[:-1], hidden.shape[-1]
    rows = math.prod(batch)
    tied = layout == "out_in"
    vocab = weight.shape[0 if tied else 1]
    single = weight.dtype == jnp.bfloat16
    subtiles = 1 if rows <= ROWS else 2
    groups = pl.cdiv(rows, ROWS * subtiles)
    tokens = 128 if vocab >= 128 else 64
    tiles = pl.cdiv(vocab, tokens)
    share = pl.cdiv(tiles, shares or max(1, _CONCURRENT // groups))
    plan = Plan(
        vocab=vocab,
        depth=depth,
        tied=tied,
        top_k=top_k,
        kept=16 if top_k > 8 else 8,
        multiplier=multiplier,
        softcap=softcap,
        subtiles=subtiles,
        groups=groups,
        tokens=tokens,
        tiles=tiles,
        share=share,
        shares=pl.cdiv(tiles, share),
        stages=(4 if subtiles == 1 else 3) if single else 2,
        terms=1 if single else 3,
    )
    x = jnp.pad(hidden.reshape(rows, depth), ((0, groups * subtiles * ROWS - rows), (0, 0)))
    values, ids = _launch(plan)(mosaic.as_terms(x, plan.terms).reshape(-1, depth), weight)
    values, ids = (jnp.moveaxis(part[:, :rows, :top_k], 0, 1).reshape(rows, -1) for part in (values, ids))
    # Shares follow one another in the vocabulary and each lists equal logits by id, so that here too
    # the first of equal ones is the lowest id.
    if top_k == 1:
        at = jnp.argmax(values, axis=-1)[:, None]
        best = jnp.take_along_axis(values, at, axis=-1)
    else:
        best, at = jax.lax.top_k(values, top_k)
    # Where not a single logit could be compared, because it was NaN, some token must still be named.
    best_ids = jnp.minimum(jnp.take_along_axis(ids, at, axis=-1), vocab - 1)
    return best.reshape(*batch, top_k), best_ids.reshape(*batch, top_k)


def _launch(plan: Plan):
    source = jnp.bfloat16 if plan.terms == 1 else jnp.float32
    rows = plan.subtiles * ROWS
    head = (plan.tokens, DEPTH) if plan.tied else (DEPTH, plan.tokens)
    scratch: dict[str, Any] = {
        "x_smem": plgpu.SMEM(
            (plan.stages, plan.terms, rows, DEPTH), jnp.bfloat16, transforms=mosaic.tile(DEPTH, jnp.bfloat16)
        ),
        "head_smem": plgpu.SMEM((plan.stages, *head), source, transforms=mosaic.tile(head[1], source)),
        "loaded": plgpu.Barrier(num_arrivals=plan.terms + 1, num_barriers=plan.stages),
    }
    if plan.terms > 1:
        scratch["term"] = plgpu.SMEM(head, jnp.bfloat16, transforms=mosaic.tile(head[1], jnp.bfloat16))
    shape = (plan.shares, plan.groups * rows, plan.kept)
    return plgpu.kernel(
        functools.partial(kernel, plan=plan),
        out_type=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        scratch_types=scratch,
        # CTAs of the same tokens run next to each other, so that one brings the head to the cache for all.
        grid=(plan.shares, plan.groups),
        grid_names=("share", "group"),
        kernel_name="lm_head",
    )
