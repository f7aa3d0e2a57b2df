"""A block of few tokens and its fold for Hopper GPUs, in Pallas' Mosaic GPU dialect.

One CTA of one warpgroup takes a row, a value head and 128 channels of the values. It looks its slot up in
`idx_mapping` and keeps those columns of the state in registers, a column to a thread, for all tokens. Columns are
independent, so no thread waits for another; all threads use the same key and query of a token. The block
reads a state once and writes none; the fold reads it once and writes it once, in place.

The convolution and the normalisations are elementwise and done by XLA.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import mosaic
from dflash_jax.kernels.gated_delta.chunks import convolved
from dflash_jax.kernels.gated_delta.parts import (
    Ingredients,
    before,
    last_inputs,
    live_counts,
    per_value_head,
    split_heads,
)

COLUMNS = 128
"""Threads of a warpgroup."""

_MOST_KEY_DIM = 128
"""Numbers of a state that a thread has in registers."""

_SUMS = 4
"""Parts of a sum down a column, so that an addition need not wait for the one before."""


def unsupported(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    qkv: Float[Array, "rows tokens channels"],
) -> str | None:
    """Why these shapes cannot be computed here, or None if they can."""
    key_dim, value_dim = states.shape[3:]
    if states.dtype != jnp.float32:
        return f"states {states.dtype} are not float32"
    if value_dim % COLUMNS:
        return f"value_dim {value_dim} is not a multiple of {COLUMNS}"
    if key_dim > _MOST_KEY_DIM:
        return f"key_dim {key_dim} is more than {_MOST_KEY_DIM}"
    return None


def gated_delta_block(
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
) -> tuple[Float[Array, "rows tokens value_heads value_dim"], Ingredients]:
    """See `api.gated_delta_block`."""
    tokens = qkv.shape[1]
    count = live_counts(idx_mapping, q_len, tokens)
    live = before(count, tokens)
    inputs = conv_inputs[layer, jnp.maximum(idx_mapping, 0)]
    q, k, v = split_heads(convolved(qkv, conv_weight, inputs, live), states.shape[2:])
    g, beta = g.astype(jnp.float32), beta.astype(jnp.float32)
    of_slots = *_of_all_layers(states, idx_mapping, layer), count
    out = _read_block(q, k, _scaled(k, beta), v, jnp.exp(g), *of_slots, plan=Plan.of(k, states))
    out = jnp.where(live[..., None, None], out, 0).astype(qkv.dtype)
    return out, Ingredients(qkv=qkv, k=k, v=v, g=g, beta=beta)


def fold_block(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    block: Ingredients,
    idx_mapping: Int[Array, " rows"],
    accepted: Int[Array, " rows"],
    *,
    layer: int,
) -> tuple[
    Float[Array, "gdn_layers slots value_heads key_dim value_dim"], Float[Array, "gdn_layers slots channels taps"]
]:
    """See `api.fold_block`."""
    count = live_counts(idx_mapping, accepted, block.g.shape[1])
    flat, slots = _of_all_layers(states, idx_mapping, layer)
    tokens = block.k, _scaled(block.k, block.beta), block.v, jnp.exp(block.g)
    folded = _write_block(*tokens, slots, count, flat, plan=Plan.of(block.k, states))
    inputs = last_inputs(conv_inputs[layer, jnp.maximum(idx_mapping, 0)], block.qkv, count)
    written = jnp.where(idx_mapping >= 0, idx_mapping, states.shape[1])
    return folded.reshape(states.shape), conv_inputs.at[layer, written].set(inputs, mode="drop")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shape of one launch; `group` value heads share a key head."""

    rows: int
    value_heads: int
    group: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, k: Float[Array, "rows tokens key_heads key_dim"], states: Array) -> Plan:
        """That of a layer's keys and all states."""
        value_heads, key_dim, value_dim = states.shape[2:]
        return cls(k.shape[0], value_heads, value_heads // k.shape[2], key_dim, value_dim)


# Both are traced once for all layers.
@functools.partial(jax.jit, static_argnames="plan")
def _read_block(q, k, scaled_k, v, decay, states, slots, count, plan: Plan):
    launch = _launch(_block, plan, jax.ShapeDtypeStruct(v.shape, jnp.float32), "gated_delta_block")
    return launch(q, k, scaled_k, v, decay, states, slots, count)


@functools.partial(jax.jit, static_argnames="plan")
def _write_block(k, scaled_k, v, decay, slots, count, states, plan: Plan):
    table = jax.new_ref(states, memory_space=plgpu.GMEM)
    _launch(_fold, plan, (), "gated_delta_fold")(k, scaled_k, v, decay, slots, count, table)
    return jax.freeze(table)


def _launch(body, plan: Plan, out_type, name: str):
    mesh = plgpu.Mesh(
        grid=(plan.rows, plan.value_heads, plan.value_dim // COLUMNS),
        grid_names=("row", "head", "part"),
        kernel_name=name,
    )
    return pl.kernel(functools.partial(body, plan=plan), out_type=out_type, mesh=mesh, name=name)


def _block(q, k, scaled_k, v, decay, states, slots, count, out, *, plan: Plan) -> None:
    """Outputs of one row, head and part of the channels. Arguments as of `api.gated_delta_block`, behind the gates."""
    row, head, columns = _place()

    def step(token, state):
        state = _written(state, row, token, head, columns, k, scaled_k, v, decay, plan)
        out[row, token, head, columns] = _read(state, q, (row, token, lax.div(head, plan.group)))
        return state

    state = _load(states, slots[row], head, columns, plan)
    lax.fori_loop(0, count[row], step, state)


def _fold(k, scaled_k, v, decay, slots, count, states, *, plan: Plan) -> None:
    """The state of one row, head and part of the channels. Arguments as of `api.fold_block`, behind the gates."""
    row, head, columns = _place()

    def step(token, state):
        return _written(state, row, token, head, columns, k, scaled_k, v, decay, plan)

    @pl.when(count[row] > 0)
    def _():
        slot = slots[row]
        state = lax.fori_loop(0, count[row], step, _load(states, slot, head, columns, plan))
        for i, numbers in enumerate(state):
            states[slot, head, i, columns] = numbers


def _of_all_layers(states: Array, idx_mapping: Int[Array, " rows"], layer: int) -> tuple[Array, Array]:
    """The states with layers and slots in one, and the rows' slots in it, so that all layers share one kernel."""
    return states.reshape(-1, *states.shape[2:]), jnp.where(idx_mapping >= 0, layer * states.shape[1] + idx_mapping, -1)


def _place():
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    return row, head, pl.ds(part * COLUMNS, COLUMNS)


def _load(states, slot, head, columns, plan: Plan) -> tuple[Array, ...]:
    """The rows of a state's columns; of slot 0 for an empty row, which has no token to meet it."""
    slot = jnp.maximum(slot, 0)
    return tuple(_vector(states, (slot, head, i, columns)) for i in range(plan.key_dim))


def _vector(ref, index) -> Float[Array, " columns"]:
    """A number for each thread."""
    return mosaic.load(ref, index, plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1))


def _read(state: tuple[Array, ...], factors, index) -> Float[Array, " columns"]:
    """state^T factors[index]."""
    sums = []
    for i, numbers in enumerate(state):
        product = numbers * factors[*index, i]
        if i < _SUMS:
            sums.append(product)
        else:
            sums[i % _SUMS] += product
    return functools.reduce(jnp.add, sums)


def _written(state, row, token, head, columns, k, scaled_k, v, decay, plan: Plan) -> tuple[Array, ...]:
    """The state's columns after a token."""
    shrink = decay[row, token, head]
    state = tuple(numbers * shrink for numbers in state)
    difference = _vector(v, (row, token, head, columns)) - _read(state, k, (row, token, lax.div(head, plan.group)))
    return tuple(numbers + scaled_k[row, token, head, i] * difference for i, numbers in enumerate(state))


def _scaled(
    k: Float[Array, "rows tokens key_heads key_dim"], beta: Float[Array, "rows tokens value_heads"]
) -> Float[Array, "rows tokens value_heads key_dim"]:
    """The keys as they are written, an array of its own.

    A compiler that sees keys read twice keeps them in registers from the first time on, of which the state leaves none.
    """
    return per_value_head(k, beta.shape[-1]) * beta[..., None]
