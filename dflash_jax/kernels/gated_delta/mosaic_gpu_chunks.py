"""The chunked form for Hopper GPUs, in Pallas' Mosaic GPU dialect: its scan over chunks, with the states' gather.

What does not depend on the states is prepared by `chunks.prepare` for all chunks at once, in XLA's products and
solves. One CTA of one warpgroup then takes a row, a value head and 64 channels of the values, keeps those columns of
the state in registers, in float32, and goes through the row's chunks: while one is multiplied the next arrives by TMA.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import mosaic
from dflash_jax.kernels.gated_delta.chunks import Chunks, as_tokens, prepare
from dflash_jax.kernels.gated_delta.parts import RowStates, last_inputs, live_counts

TILE = 64
"""Tokens of a chunk, columns of a CTA, and rows of a state that one matrix instruction takes."""


def unsupported(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    qkv: Float[Array, "rows tokens channels"],
) -> str | None:
    """Why these shapes cannot be computed here, or None if they can."""
    key_dim, value_dim = states.shape[3:]
    if states.dtype != jnp.float32 or qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"states {states.dtype} and projections {qkv.dtype} are not float32 and bfloat16 or float32"
    if value_dim % TILE or key_dim not in (TILE, 2 * TILE):
        return f"key_dim {key_dim} is not {TILE} or {2 * TILE}, or value_dim {value_dim} is not a multiple of {TILE}"
    return None


def gated_delta_prefill(
    qkv: Float[Array, "rows tokens channels"],
    g: Float[Array, "rows tokens value_heads"],
    beta: Float[Array, "rows tokens value_heads"],
    conv_weight: Float[Array, "channels width"],
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    idx_mapping: Int[Array, " rows"],
    q_len: Int[Array, " rows"],
    *,
    layer: int,
) -> tuple[Float[Array, "rows tokens value_heads value_dim"], RowStates]:
    """See `api.gated_delta_prefill`."""
    rows, tokens, _ = qkv.shape
    num_slots, heads, key_dim, value_dim = states.shape[1:]
    count = live_counts(idx_mapping, q_len, tokens)
    slots = jnp.maximum(idx_mapping, 0)
    inputs = conv_inputs[layer, slots]
    chunks = prepare(qkv, g, beta, conv_weight, count, inputs, (heads, key_dim, value_dim), TILE)
    single = qkv.dtype == jnp.bfloat16
    plan = Plan(rows, heads, key_dim, value_dim, len(chunks.kept), terms=1 if single else 2, stages=2 if single else 1)
    out, state = _scan(
        *_operands(chunks, plan),
        # Leading dimensions merge without moving anything: the states are read where they are.
        states.reshape(-1, value_dim),
        layer * num_slots + slots,
        -(-count // TILE),
        plan=plan,
    )
    out = out.reshape(len(chunks.kept), rows, heads, TILE, value_dim)
    end = RowStates(state=state.reshape(rows, heads, key_dim, value_dim), conv_inputs=last_inputs(inputs, qkv, count))
    return as_tokens(out, count, tokens).astype(qkv.dtype), end


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shape of one launch.

    Attributes:
      chunks: of the longest row.
      terms: bfloat16 numbers that an operand is the sum of: two keep 16 bits of a float32.
      stages: chunks in flight.
    """

    rows: int
    heads: int
    key_dim: int
    value_dim: int
    chunks: int
    terms: int
    stages: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Terms of two operands whose products count; that of two small ones is below the last digit."""
        return [(a, b) for a in range(self.terms) for b in range(self.terms - a)]

    @property
    def subtiles(self) -> int:
        """Of a state's rows."""
        return self.key_dim // TILE


def _operands(chunks: Chunks, plan: Plan) -> tuple[Array, ...]:
    """Matrices whose rows are the chunks' one after the other, the terms of all of them one after the other."""

    def stacked(x):
        return mosaic.as_terms(x.reshape(-1, x.shape[-1]), plan.terms).astype(jnp.bfloat16).reshape(-1, x.shape[-1])

    factors = (chunks.carried, chunks.q, chunks.seen, chunks.k.swapaxes(-1, -2))
    return *map(stacked, factors), chunks.own.reshape(-1, plan.value_dim), chunks.kept.reshape(-1)


# Traced once for all layers.
@functools.partial(jax.jit, static_argnames="plan")
def _scan(*operands, plan: Plan):
    return _launch(plan)(*operands)


def _launch(plan: Plan):
    def matrices(*shape):
        """bfloat16 operands in shared memory."""
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.tile(shape[-1], jnp.bfloat16))

    def floats(*shape):
        return plgpu.SMEM(shape, jnp.float32, transforms=mosaic.tile(TILE, jnp.float32))

    staged = (plan.stages, plan.terms)
    scratch: dict[str, Any] = {
        "carried_smem": matrices(*staged, TILE, plan.key_dim),
        "q_smem": matrices(*staged, TILE, plan.key_dim),
        "seen_smem": matrices(*staged, TILE, TILE),
        "k_smem": matrices(*staged, plan.key_dim, TILE),
        "own_smem": floats(plan.stages, TILE, TILE),
        "state_smem": matrices(plan.terms, plan.key_dim, TILE),
        "difference_smem": matrices(plan.terms, TILE, TILE),
        "tile_smem": floats(TILE, TILE),
        "loaded": plgpu.Barrier(num_arrivals=4 * plan.terms + 1, num_barriers=plan.stages),
        "tile_loaded": plgpu.Barrier(),
    }
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((plan.chunks * plan.rows * plan.heads * TILE, plan.value_dim), jnp.float32),
            jax.ShapeDtypeStruct((plan.rows * plan.heads * plan.key_dim, plan.value_dim), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(plan.rows, plan.heads, plan.value_dim // TILE),
        grid_names=("row", "head", "part"),
        kernel_name="gated_delta_chunks",
    )


def _kernel(
    carried,
    q,
    seen,
    k,
    own,
    kept,
    states,
    slots,
    row_chunks,
    out,
    state_out,
    *,
    plan: Plan,
    carried_smem,
    q_smem,
    seen_smem,
    k_smem,
    own_smem,
    state_smem,
    difference_smem,
    tile_smem,
    loaded,
    tile_loaded,
) -> None:
    """One row, value head and part of the channels.

    Args:
      carried, q, seen, k, own, kept: of all chunks, see `_operands`; k transposed.
      states: [gdn_layers * slots * heads * key_dim, value_dim].
      slots: of each row, counted over all layers.
      row_chunks: chunks of each row.
      out: [chunks * rows * heads * TILE, value_dim].
      state_out: [rows * heads * key_dim, value_dim].
      plan: the launch.
      carried_smem, ...: shared memory and barriers, see `_launch`.
    """
    row, head = lax.axis_index("row"), lax.axis_index("head")
    columns = pl.ds(lax.axis_index("part") * TILE, TILE)
    count = row_chunks[row]
    row_and_head = row * plan.heads + head

    def place(chunk):
        return chunk * (plan.rows * plan.heads) + row_and_head

    def load(chunk):
        """Starts copying a chunk to its stage; nothing if there are not that many."""

        @pl.when(chunk < count)
        def _():
            stage = lax.rem(chunk, plan.stages)
            for source, target in ((carried, carried_smem), (q, q_smem), (seen, seen_smem), (k, k_smem)):
                size = target.shape[2]
                for term in range(plan.terms):
                    first = (term * plan.chunks * plan.rows * plan.heads + place(chunk)) * size
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(first, size)], target.at[stage, term], loaded.at[stage])
            source = own.at[pl.ds(place(chunk) * TILE, TILE), columns]
            plgpu.copy_gmem_to_smem(source, own_smem.at[stage], loaded.at[stage])

    def store(x, target):
        """Writes a tile to global memory."""
        tile_smem[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_smem, target)
        plgpu.wait_smem_to_gmem(0)

    def step(chunk, state):
        stage = lax.rem(chunk, plan.stages)
        for subtile, x in enumerate(state):
            for term, part in enumerate(mosaic.terms(x, plan.terms)):
                state_smem[term, pl.ds(subtile * TILE, TILE)] = part
        plgpu.commit_smem()
        plgpu.barrier_wait(loaded.at[stage])
        before = [(carried_smem.at[stage, a], state_smem.at[b]) for a, b in plan.pairs]
        difference = mosaic.with_layout(own_smem[stage], plgpu.Layout.WGMMA) - _product(before)
        for term, part in enumerate(mosaic.terms(difference, plan.terms)):
            difference_smem[term] = part
        plgpu.commit_smem()
        read = [(q_smem.at[stage, a], state_smem.at[b]) for a, b in plan.pairs]
        read += [(seen_smem.at[stage, a], difference_smem.at[b]) for a, b in plan.pairs]
        store(_product(read), out.at[pl.ds(place(chunk) * TILE, TILE), columns])
        remaining = kept[place(chunk)]
        state = tuple(
            x * remaining
            + _product([(k_smem.at[stage, a, pl.ds(i * TILE, TILE)], difference_smem.at[b]) for a, b in plan.pairs])
            for i, x in enumerate(state)
        )
        load(chunk + plan.stages)
        return state

    for chunk in range(plan.stages):
        load(jnp.int32(chunk))
    state = []
    for subtile in range(plan.subtiles):
        first = (slots[row] * plan.heads + head) * plan.key_dim + subtile * TILE
        plgpu.copy_gmem_to_smem(states.at[pl.ds(first, TILE), columns], tile_smem, tile_loaded)
        plgpu.barrier_wait(tile_loaded)
        state.append(mosaic.with_layout(tile_smem[...], plgpu.Layout.WGMMA))
        plgpu.commit_smem()
    for subtile, x in enumerate(lax.fori_loop(0, count, step, tuple(state))):
        store(x, state_out.at[pl.ds(row_and_head * plan.key_dim + subtile * TILE, TILE), columns])


def _product(pairs) -> Float[Array, "rows columns"]:
    """Sum of a @ b over pairs of matrices in shared memory."""

    def step(_, multiply):
        for a, b in pairs:
            multiply(0, a, b, transposed=False)

    return mosaic.products(1, step, [(TILE, TILE)])[0]
