"""What every implementation of the gated delta rule has in common: gates, heads, and the arrays that leave a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

_EPSILON = 1e-6
"""Added to the square of a query's or key's length."""


class RowStates(struct.PyTreeNode):
    """What rows carry from token to token.

    Attributes:
      state: a matrix per value head, which a key is read from and a difference is written to, in float32 or better.
      conv_inputs: the convolution's last inputs, oldest first.
    """

    state: Float[Array, "rows value_heads key_dim value_dim"]
    conv_inputs: Float[Array, "rows channels taps"]


class Ingredients(struct.PyTreeNode):
    """What the tokens of a block put into the rows' states once they are accepted, and nothing has yet.

    Attributes:
      qkv: the convolution's inputs.
      k: keys, normalised.
      v: values.
      g: the logarithm of how much of the state stays.
      beta: how much of the difference is written.
    """

    qkv: Float[Array, "rows tokens channels"]
    k: Float[Array, "rows tokens key_heads key_dim"]
    v: Float[Array, "rows tokens value_heads value_dim"]
    g: Float[Array, "rows tokens value_heads"]
    beta: Float[Array, "rows tokens value_heads"]


def gates(
    a: Float[Array, "*batch value_heads"],
    b: Float[Array, "*batch value_heads"],
    a_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"],
) -> tuple[Float[Array, "*batch value_heads"], Float[Array, "*batch value_heads"]]:
    """How much of the state stays, as a logarithm, and how much of the difference is written; in float32 or better.

    g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b) (arXiv 2412.06464; the parameters are Mamba's).
    """
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b, a_log, dt_bias = (x.astype(wide) for x in (a, b, a_log, dt_bias))
    return -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


def key_heads(channels: int, state: tuple[int, ...]) -> int:
    """How many heads of keys, and of queries, there are among the convolution's channels, beside the values.

    Args:
      channels: of the convolution.
      state: value heads, key_dim and value_dim.

    Raises:
      TypeError: they do not fit each other.
    """
    value_heads, key_dim, value_dim = state
    heads, rest = divmod(channels - value_heads * value_dim, 2 * key_dim)
    if heads < 1 or rest or value_heads % heads:
        raise TypeError(
            f"{channels} channels are not {value_heads} heads of {value_dim} values and, twice, a number of heads of "
            f"{key_dim} keys that divides {value_heads}"
        )
    return heads


def split_heads(
    convolved: Float[Array, "*batch channels"], state: tuple[int, ...]
) -> tuple[
    Float[Array, "*batch key_heads key_dim"],
    Float[Array, "*batch key_heads key_dim"],
    Float[Array, "*batch value_heads value_dim"],
]:
    """Queries, keys and values: queries and keys of length 1, queries then scaled by key_dim^-1/2.

    Args:
      convolved: all channels: queries, keys, values.
      state: value heads, key_dim and value_dim.
    """
    value_heads, key_dim, value_dim = state
    heads = key_heads(convolved.shape[-1], state)
    batch = convolved.shape[:-1]
    q, k, v = jnp.split(convolved, [heads * key_dim, 2 * heads * key_dim], axis=-1)
    q, k = (x.reshape(*batch, heads, key_dim) for x in (q, k))
    q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _EPSILON) for x in (q, k))
    return q * key_dim**-0.5, k, v.reshape(*batch, value_heads, value_dim)


def per_value_head(x: Float[Array, "rows *tokens key_heads key_dim"], value_heads: int) -> Array:
    """Each key head's array for all the value heads that share it, which are adjacent."""
    return jnp.repeat(x, value_heads // x.shape[-2], axis=-2)


def last_inputs(
    conv_inputs: Float[Array, "rows channels taps"],
    qkv: Float[Array, "rows tokens channels"],
    count: Int[Array, " rows"],
) -> Float[Array, "rows channels taps"]:
    """The convolution's last inputs once it has had the first `count` of its new ones."""
    every = jnp.concatenate([conv_inputs, qkv.astype(conv_inputs.dtype).swapaxes(1, 2)], axis=-1)
    at = count[:, None] + jnp.arange(conv_inputs.shape[-1])
    return jnp.take_along_axis(every, at[:, None], axis=-1)


def live_counts(idx_mapping: Int[Array, " rows"], q_len: Int[Array, " rows"], tokens: int) -> Int[Array, " rows"]:
    """Tokens of each row; none of an empty row."""
    return jnp.where(idx_mapping >= 0, jnp.clip(q_len, 0, tokens), 0)


def of_rows(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    idx_mapping: Int[Array, " rows"],
    layer: int,
) -> RowStates:
    """The rows' states, from their slots; those of slot 0 for empty rows."""
    slots = jnp.maximum(idx_mapping, 0)
    return RowStates(state=states[layer, slots], conv_inputs=conv_inputs[layer, slots])


def to_slots(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    end: RowStates,
    idx_mapping: Int[Array, " rows"],
    layer: int,
) -> tuple[
    Float[Array, "gdn_layers slots value_heads key_dim value_dim"], Float[Array, "gdn_layers slots channels taps"]
]:
    """The tables with the rows' states in their slots; those of empty rows are dropped."""
    # A negative index would count from the end; one behind the last slot is dropped.
    slots = jnp.where(idx_mapping >= 0, idx_mapping, states.shape[1])
    states = states.at[layer, slots].set(end.state.astype(states.dtype), mode="drop")
    return states, conv_inputs.at[layer, slots].set(end.conv_inputs.astype(conv_inputs.dtype), mode="drop")


def zero_after(*read: Float[Array, ...]) -> Int[Array, ""]:
    """0, of which the compiler does not know that it is before it has computed these arrays.

    What reads slots' states must run before what writes them. Where what is written does not depend on all that is
    read, the compiler may see no order, and copies the states of all slots instead.
    """
    zero = jnp.int32(0)
    for x in read:
        sign = jax.lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.int32) >> 31
        zero += sign * (sign + 1)  # of 0 and -1
    return zero


def before(count: Int[Array, " rows"], tokens: int) -> Bool[Array, "rows tokens"]:
    """Which tokens of each row exist."""
    return jnp.arange(tokens) < count[:, None]
