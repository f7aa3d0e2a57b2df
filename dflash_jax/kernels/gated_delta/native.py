"""A block of few tokens and its fold on CPUs, from C++; see `kernels/native/gated_delta.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import native
from dflash_jax.kernels.gated_delta.parts import Ingredients, RowStates, key_heads, last_inputs, live_counts


def unsupported(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    qkv: Float[Array, "rows tokens channels"],
) -> str | None:
    """Why these operands cannot be computed here, or None if they can."""
    if states.dtype != jnp.float32 or not native.computes(conv_inputs.dtype, qkv.dtype):
        return (
            f"states {states.dtype} are not float32, or the convolution's inputs {conv_inputs.dtype} and {qkv.dtype} "
            "neither float32 nor bfloat16"
        )
    return native.unavailable()


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
    """See `api.gated_delta_block`; a row's results are bitwise the same whatever other rows there are.

    Only where `kernels.native.available`, in float32 and bfloat16. It has no derivative.
    """
    out, block, _ = _compute(qkv, g, beta, conv_weight, states, conv_inputs, idx_mapping, q_len, layer, ends=False)
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
    """See `api.gated_delta_prefill`; bitwise the results of the tokens one by one.

    The state stays in a CPU's cache, so token by token is faster than the chunks' products and solves.
    """
    out, _, state = _compute(qkv, g, beta, conv_weight, states, conv_inputs, idx_mapping, q_len, layer, ends=True)
    inputs = conv_inputs[layer, jnp.maximum(idx_mapping, 0)]
    count = live_counts(idx_mapping, q_len, qkv.shape[1])
    return out, RowStates(state=state, conv_inputs=last_inputs(inputs, qkv, count))


def _compute(qkv, g, beta, conv_weight, states, conv_inputs, idx_mapping, q_len, layer: int, ends: bool):
    """Outputs, ingredients, and the rows' states at their end, of no rows if they are not asked for."""
    rows, tokens, channels = qkv.shape
    value_heads, key_dim, value_dim = shape = states.shape[2:]
    wide = [x.astype(jnp.float32) for x in (qkv, g, beta, conv_weight)]
    values = jax.ShapeDtypeStruct((rows, tokens, value_heads, value_dim), jnp.float32)
    keys = jax.ShapeDtypeStruct((rows, tokens, key_heads(channels, shape), key_dim), jnp.float32)
    after = jax.ShapeDtypeStruct((rows if ends else 0, *shape), jnp.float32)
    compute = jax.ffi.ffi_call("dflash_delta_block", (values, keys, values, after), vmap_method="sequential")
    indices = (x.astype(jnp.int32) for x in (idx_mapping, q_len))
    out, k, v, state = compute(*wide, states, conv_inputs, *indices, layer=np.int64(layer))
    return out.astype(qkv.dtype), Ingredients(qkv=qkv, k=k, v=v, g=wide[1], beta=wide[2]), state


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
    """See `api.fold_block`; a row's states are bitwise the same whatever other rows there are.

    Only where `kernels.native.available`, in float32 and bfloat16. It has no derivative.
    """
    tables = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (states, conv_inputs))
    compute = jax.ffi.ffi_call("dflash_delta_fold", tables, input_output_aliases={0: 0, 1: 1}, vmap_method="sequential")
    indices = (x.astype(jnp.int32) for x in (idx_mapping, accepted))
    ingredients = block.qkv.astype(conv_inputs.dtype), block.k, block.v, block.g, block.beta
    states, conv_inputs = compute(states, conv_inputs, *ingredients, *indices, layer=np.int64(layer))
    return states, conv_inputs
