"""`select_path` for Hopper GPUs, in Pallas' Mosaic GPU dialect: one launch for all positions.

One CTA of one warpgroup walks a row. It starts the copies of all its candidates' successor codes to
shared memory at once; what then depends on the walk is one predecessor code per position, read from
global memory. Only the edges from the chosen predecessor are scored, not all of them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import mosaic

CANDIDATES = 16
"""Candidates of a position in registers; fewer are padded."""

_SHARED_MEMORY = 200 * 1024
"""Of a multiprocessor, less what reductions and barriers take."""


def unsupported(
    tokens: Int[Array, "rows drafts candidates"],
    gate: Float[Array, "rows drafts rank"],
    predecessor_codebook: Float[Array, "vocab rank"],
    successor_codebook: Float[Array, "vocab rank"],
) -> str | None:
    """Why these shapes cannot be computed here, or None if they can."""
    drafts, top_k = tokens.shape[1:]
    rank, dtype = successor_codebook.shape[1], successor_codebook.dtype
    if dtype not in (jnp.bfloat16, jnp.float32) or {dtype, predecessor_codebook.dtype, gate.dtype} != {dtype}:
        return (
            f"codebooks {predecessor_codebook.dtype} and {dtype} and gate {gate.dtype} "
            "are not all bfloat16 or all float32"
        )
    if top_k > CANDIDATES:
        return f"{top_k} candidates are more than {CANDIDATES}"
    if rank * dtype.itemsize % 128 or rank > 256:
        return f"rank {rank} is more than 256 or its codes of {dtype} are not a multiple of 128 bytes"
    if drafts * CANDIDATES * rank * dtype.itemsize > _SHARED_MEMORY:
        return f"the {dtype} codes of {drafts} positions at rank {rank} are more than {_SHARED_MEMORY} bytes"
    return None


def select_path(
    tokens: Int[Array, "rows drafts candidates"],
    unary: Float[Array, "rows drafts candidates"],
    gate: Float[Array, "rows drafts rank"],
    anchor: Int[Array, " rows"],
    predecessor_codebook: Float[Array, "vocab rank"],
    successor_codebook: Float[Array, "vocab rank"],
    temperature: Float[Array, " rows"],
    noise: Float[Array, "rows drafts candidates"] | None,
) -> tuple[Int[Array, "rows drafts"], Float[Array, "rows drafts candidates"]]:
    """See `api.select_path`."""
    rows, drafts, top_k = tokens.shape
    rank = gate.shape[-1]

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, CANDIDATES - top_k)))

    path, probs = plgpu.kernel(
        functools.partial(_kernel, drafts=drafts, top_k=top_k, layout=_codes_layout(rank)),
        out_type=(
            jax.ShapeDtypeStruct((rows, drafts), jnp.int32),
            jax.ShapeDtypeStruct((rows, drafts, CANDIDATES), jnp.float32),
        ),
        scratch_types={
            "codes": plgpu.SMEM((drafts, CANDIDATES, rank), successor_codebook.dtype),
            "loaded": plgpu.Barrier(num_arrivals=top_k, num_barriers=drafts),
        },
        grid=(rows,),
        grid_names=("row",),
        kernel_name="select_path",
    )(
        tokens,
        padded(unary),
        gate,
        anchor,
        predecessor_codebook,
        successor_codebook,
        temperature,
        *(() if noise is None else (padded(noise),)),
    )
    return path, probs[..., :top_k]


def _codes_layout(rank: int):
    """[CANDIDATES, rank] in registers: a warp has a quarter of every code, two lanes share a candidate.

    Scores then meet once across warps, and everything after that stays within one.
    """
    vector = math.gcd(rank // 8, 8)
    return plgpu.Layout.TILED(
        Tiling(((CANDIDATES, 8 * vector), (2 * vector,), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-4, -2),
        vector_dim=-1,
    )


def _kernel(
    tokens,
    unary,
    gate,
    anchor,
    predecessor_codebook,
    successor_codebook,
    temperature,
    *noise_and_outputs,
    drafts: int,
    top_k: int,
    layout,
    codes,
    loaded,
) -> None:
    """One row. Arguments as in `api.select_path`, candidates padded, then the outputs.

    Args:
      layout: of a position's codes in registers.
      codes, loaded: shared memory of all positions' codes, and the barriers that say a position's are there.
    """
    *noise, path, probs = noise_and_outputs
    row = lax.axis_index("row")
    vocab = successor_codebook.shape[0]
    per_rank, per_candidate = layout.reduce(0), layout.reduce(1)
    candidate = mosaic.with_layout(lax.broadcasted_iota(jnp.int32, (CANDIDATES,), 0), per_candidate)
    exists = candidate < top_k
    heat = temperature[row]
    sampled = heat > 0
    divisor = jnp.where(sampled, heat, 1.0)

    def code(token):
        return jnp.clip(token, 0, vocab - 1)

    def fetch(position, carry):
        for index in range(top_k):
            source = successor_codebook.at[code(tokens[row, position, index])]
            plgpu.copy_gmem_to_smem(source, codes.at[position, index], loaded.at[position])
        return carry

    def step(position, previous):
        predecessor = mosaic.load(predecessor_codebook, code(previous), per_rank).astype(jnp.float32)
        gated = predecessor * mosaic.load(gate, (row, position), per_rank).astype(jnp.float32)
        alone = mosaic.load(unary, (row, position), per_candidate)
        plgpu.barrier_wait(loaded.at[position])
        successors = mosaic.load(codes, position, layout).astype(jnp.float32)
        gated = mosaic.with_layout(lax.broadcast_in_dim(gated, successors.shape, (1,)), layout)
        scores = ((gated * successors).sum(axis=1) + alone) / divisor
        # The codes of padding were never written: whatever they are, they must not win.
        scores = jnp.where(exists, scores, -jnp.inf)
        drawn = scores
        if noise:
            drawn += jnp.where(sampled, mosaic.load(noise[0], (row, position), per_candidate), 0)
        best = jnp.where(drawn == drawn.max(axis=0), candidate, top_k - 1).min(axis=0)
        chance = jnp.where(candidate == best, 1.0, 0.0)
        if noise:
            weights = jnp.exp(scores - scores.max(axis=0))
            chance = jnp.where(sampled, weights / weights.sum(axis=0), chance)
        probs[row, position] = chance
        token = tokens[row, position, best]
        path[row, position] = token
        return token

    lax.fori_loop(0, drafts, fetch, 0)
    lax.fori_loop(0, drafts, step, anchor[row])
