"""A block's tokens and their fold in plain XLA operations.

Tokens are taken one after the other, by loops whose bodies compute nothing as long as the block and whose length is not
known to the compiler. So a body is compiled alike for one token and for many, and on CPUs a token's result is bitwise
the same alone and in a block, and whether the tokens before it were folded one by one or together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.gated_delta.parts import (
    Ingredients,
    RowStates,
    before,
    key_heads,
    last_inputs,
    live_counts,
    of_rows,
    per_value_head,
    split_heads,
    to_slots,
)


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
    start = of_rows(states, conv_inputs, idx_mapping, layer)
    q, k, v = _convolve(qkv, conv_weight, start, jnp.max(count))
    block = Ingredients(qkv=qkv, k=k, v=v, g=g.astype(jnp.float32), beta=beta.astype(jnp.float32))
    _, out = _run(start.state, block, count, q)
    return jnp.where(before(count, tokens)[..., None, None], out, 0).astype(qkv.dtype), block


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
    start = of_rows(states, conv_inputs, idx_mapping, layer)
    state, _ = _run(start.state, block, count)
    end = RowStates(state=state, conv_inputs=last_inputs(start.conv_inputs, block.qkv, count))
    return to_slots(states, conv_inputs, end, idx_mapping, layer)


def _convolve(qkv, conv_weight, start: RowStates, count: Int[Array, ""]) -> tuple[Array, Array, Array]:
    """Queries, keys and values of the first `count` tokens.

    In a loop of its own, so that the fold, which finds keys and values in memory, does not do with them what
    is not done here: a value that is still a product when something is subtracted from it is not rounded before.
    """
    rows, tokens, channels = qkv.shape
    shape, width = start.state.shape[1:], conv_weight.shape[1]
    inputs = jnp.concatenate([start.conv_inputs.swapaxes(1, 2), qkv], axis=1).astype(jnp.float32)
    inputs, weight = _lengthened(inputs, tokens), conv_weight.T.astype(jnp.float32)

    def step(token, written):
        window = jax.lax.dynamic_slice_in_dim(inputs, token, width, axis=1)
        found = split_heads(jax.nn.silu(_convolved(window, weight)), shape)
        return tuple(x.at[:, token].set(value) for x, value in zip(written, found, strict=True))

    keys = jnp.zeros((rows, tokens, key_heads(channels, shape), shape[1]), jnp.float32)
    values = jnp.zeros((rows, tokens, shape[0], shape[2]), jnp.float32)
    empty = tuple(_lengthened(x, tokens) for x in (keys, keys, values))
    return tuple(x[:, :tokens] for x in jax.lax.fori_loop(0, count, step, empty))


def _run(
    state: Float[Array, "rows value_heads key_dim value_dim"],
    block: Ingredients,
    count: Int[Array, " rows"],
    q: Float[Array, "rows tokens key_heads key_dim"] | None = None,
) -> tuple[Array, Array]:
    """The states after each row's first tokens, and what these tokens' queries read, zeros without queries."""
    tokens, heads = block.g.shape[1:]
    k, v, g, beta = (_lengthened(x, tokens) for x in (block.k, block.v, block.g, block.beta))
    q = None if q is None else _lengthened(q, tokens)

    def step(token, carry):
        state, out = carry
        k_now, v_now, g_now, beta_now = (_at(x, token) for x in (k, v, g, beta))
        state = _written(state, per_value_head(k_now, heads), v_now, g_now, beta_now, token < count)
        if q is not None:
            out = out.at[:, token].set((state * per_value_head(_at(q, token), heads)[..., None]).sum(-2))
        return state, out

    state, out = jax.lax.fori_loop(0, jnp.max(count), step, (state, jnp.zeros_like(v)))
    return state, out[:, :tokens]


def _lengthened(x: Array, tokens: int) -> Array:
    """x [rows, tokens, ...] with one more, if it is the only one.

    An axis of length 1 disappears, and what indexes it with it: the loop's body would be another.
    """
    return jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2))) if tokens == 1 else x


def _at(x: Array, token: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(x, token, axis=1, keepdims=False).astype(jnp.float32)


def _convolved(
    window: Float[Array, "rows width channels"], weight: Float[Array, "width channels"]
) -> Float[Array, "rows channels"]:
    """Sum over the window; of the first two products the compiler could fuse either, see `_written`."""
    total = jnp.where(weight[0] != 0, window[:, 0] * weight[0], 0)
    for tap in range(1, weight.shape[0]):
        total = total + window[:, tap] * weight[tap]
    return total


def _written(
    state: Float[Array, "rows value_heads key_dim value_dim"],
    k: Float[Array, "rows value_heads key_dim"],
    v: Float[Array, "rows value_heads value_dim"],
    g: Float[Array, "rows value_heads"],
    beta: Float[Array, "rows value_heads"],
    live,
) -> Float[Array, "rows value_heads key_dim value_dim"]:
    """The states after a token, of rows that have it.

    Products with sums would leave the compiler a choice: in decay * state + k * difference, as in state * q, it may
    fuse one product or the other with the addition, and choose otherwise for the block than for the fold. A
    product behind a condition cannot be fused, so that only k * difference is left.
    """
    live = live[:, None, None, None]
    decay = jnp.exp(g)[..., None, None]
    kept = jnp.where(decay != 1, decay * state, state)
    difference = beta[..., None] * (v - (kept * k[..., None]).sum(-2))
    return jnp.where(live, kept + k[..., None] * difference[..., None, :], state)
