"""The gated delta rule in its simplest form: one token after the other (arXiv 2412.06464, equation 10)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.gated_delta.parts import (
    Ingredients,
    RowStates,
    last_inputs,
    live_counts,
    of_rows,
    per_value_head,
    split_heads,
    to_slots,
)


def gated_delta(
    qkv: Float[Array, "rows tokens channels"],
    g: Float[Array, "rows tokens value_heads"],
    beta: Float[Array, "rows tokens value_heads"],
    conv_weight: Float[Array, "channels width"],
    count: Int[Array, " rows"],
    start: RowStates,
) -> tuple[Float[Array, "rows tokens value_heads value_dim"], RowStates]:
    """See `api.gated_delta`."""
    out, end, _ = _run(qkv, g, beta, conv_weight, count, start)
    return out, end


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
    count = live_counts(idx_mapping, q_len, qkv.shape[1])
    out, _, block = _run(qkv, g, beta, conv_weight, count, of_rows(states, conv_inputs, idx_mapping, layer))
    return out, block


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
    count = live_counts(idx_mapping, q_len, qkv.shape[1])
    return gated_delta(qkv, g, beta, conv_weight, count, of_rows(states, conv_inputs, idx_mapping, layer))


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
    state = start.state
    for token in range(block.g.shape[1]):
        new, _ = _write(state, block.k[:, token], block.v[:, token], block.g[:, token], block.beta[:, token])
        state = jnp.where((token < count)[:, None, None, None], new, state)
    end = RowStates(state=state, conv_inputs=last_inputs(start.conv_inputs, block.qkv, count))
    return to_slots(states, conv_inputs, end, idx_mapping, layer)


def _run(qkv, g, beta, conv_weight, count, start: RowStates):
    """Outputs, states after each row's count, and ingredients."""
    wide = jnp.promote_types(qkv.dtype, start.state.dtype)
    heads, shape = start.state.shape[1], start.state.shape[1:]

    def step(carry, token):
        window, state, index = carry
        x, g, beta = token
        window = jnp.concatenate([window, x[..., None]], axis=-1)
        convolved = jax.nn.silu((window * conv_weight.astype(wide)).sum(-1))
        q, k, v = split_heads(convolved, shape)
        new, read = _write(state, k, v, g, beta, per_value_head(q, heads))
        live = index < count
        state = jnp.where(live[:, None, None, None], new, state)
        out = jnp.where(live[:, None, None], read, 0)
        return (window[..., 1:], state, index + 1), (out, k, v)

    tokens = tuple(jnp.moveaxis(x.astype(wide), 1, 0) for x in (qkv, g, beta))
    carry = (start.conv_inputs.astype(wide), start.state.astype(wide), 0)
    (_, state, _), outputs = jax.lax.scan(step, carry, tokens)
    out, k, v = (jnp.moveaxis(x, 0, 1) for x in outputs)
    end = RowStates(state=state, conv_inputs=last_inputs(start.conv_inputs, qkv, count))
    block = Ingredients(qkv=qkv, k=k, v=v, g=g.astype(wide), beta=beta.astype(wide))
    return out.astype(qkv.dtype), end, block


def _write(state, k, v, g, beta, q=None):
    """The states after a token, and what its query reads from them."""
    k = per_value_head(k, state.shape[1])
    state = jnp.exp(g)[..., None, None] * state
    difference = beta[..., None] * (v - jnp.einsum("rhkv,rhk->rhv", state, k))
    state = state + k[..., None] * difference[..., None, :]
    return state, None if q is None else jnp.einsum("rhkv,rhk->rhv", state, q)
