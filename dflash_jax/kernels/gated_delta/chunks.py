"""The gated delta rule over many tokens, as products of matrices: the chunked form (arXiv 2412.06464, section 3.3).

Within a chunk of C tokens with keys k_i, values v_i and G_i the sum of the g up to token i, a token's difference is

    d_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_j . k_i) d_j),

so (I + A) d = beta v - beta exp(G) k S with A strictly lower triangular. Both right sides are solved for all chunks
at once, the first as it is and the second without S. What then depends on the chunk before is a scan of products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.gated_delta.parts import (
    RowStates,
    before,
    last_inputs,
    live_counts,
    of_rows,
    per_value_head,
    split_heads,
)

CHUNK = 64


def gated_delta(
    qkv: Float[Array, "rows tokens channels"],
    g: Float[Array, "rows tokens value_heads"],
    beta: Float[Array, "rows tokens value_heads"],
    conv_weight: Float[Array, "channels width"],
    count: Int[Array, " rows"],
    start: RowStates,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "rows tokens value_heads value_dim"], RowStates]:
    """See `api.gated_delta`; `chunk` is the number of tokens solved for together."""
    tokens, shape = qkv.shape[1], start.state.shape[1:]
    prepared = prepare(qkv, g, beta, conv_weight, count, start.conv_inputs, shape, min(chunk, tokens))

    def step(state, of_chunk: Chunks):
        difference = of_chunk.own - jnp.einsum("rhik,rhkv->rhiv", of_chunk.carried, state)
        out = jnp.einsum("rhik,rhkv->rhiv", of_chunk.q, state)
        out += jnp.einsum("rhij,rhjv->rhiv", of_chunk.seen, difference)
        state = of_chunk.kept[..., None, None] * state
        return state + jnp.einsum("rhik,rhiv->rhkv", of_chunk.k, difference), out

    state, out = jax.lax.scan(step, start.state.astype(prepared.k.dtype), prepared)
    end = RowStates(state=state.astype(start.state.dtype), conv_inputs=last_inputs(start.conv_inputs, qkv, count))
    return as_tokens(out, count, tokens).astype(qkv.dtype), end


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


class Chunks(struct.PyTreeNode):
    """All that the scan over chunks needs of them.

    Attributes:
      own: what the solve makes of the values.
      carried: what it makes of the keys, which the state before the chunk is subtracted by.
      seen: what each query reads of each difference of its chunk.
      q: queries, for the state before the chunk.
      k: keys, for the state after it.
      kept: how much of the state before the chunk is left after it.
    """

    own: Float[Array, "chunks rows value_heads chunk value_dim"]
    carried: Float[Array, "chunks rows value_heads chunk key_dim"]
    seen: Float[Array, "chunks rows value_heads chunk chunk"]
    q: Float[Array, "chunks rows value_heads chunk key_dim"]
    k: Float[Array, "chunks rows value_heads chunk key_dim"]
    kept: Float[Array, "chunks rows value_heads"]


def prepare(
    qkv: Float[Array, "rows tokens channels"],
    g: Float[Array, "rows tokens value_heads"],
    beta: Float[Array, "rows tokens value_heads"],
    conv_weight: Float[Array, "channels width"],
    count: Int[Array, " rows"],
    conv_inputs: Float[Array, "rows channels taps"],
    shape: tuple[int, ...],
    chunk: int,
) -> Chunks:
    """What does not depend on the states, of all chunks at once; a token that does not exist is the identity.

    Args:
      shape: of a row's state: value heads, key_dim and value_dim.
      chunk: tokens of a chunk; the last is filled up.
      qkv, ...: as of `api.gated_delta`.
    """
    rows, tokens, _ = qkv.shape
    heads, _, value_dim = shape
    live = before(count, tokens)
    q, k, v = split_heads(convolved(qkv, conv_weight, conv_inputs, live), shape)
    g, beta = (jnp.where(live[..., None], x, 0).astype(k.dtype) for x in (g, beta))

    def in_chunks(x):
        """[chunks, rows, value_heads, chunk, ...]"""
        x = jnp.pad(x, ((0, 0), (0, -tokens % chunk), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(rows, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    q, k, v, g, beta = map(in_chunks, (per_value_head(q, heads), per_value_head(k, heads), v, g, beta))
    total = jnp.cumsum(g, axis=-1)
    # Masked before the exponential, which of what is above the diagonal can be infinite.
    earlier = jnp.tril(jnp.ones((chunk, chunk), bool))
    decay = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))
    grown = jnp.exp(total)[..., None]
    left = jnp.exp(total[..., -1:] - total)[..., None]

    lower = beta[..., None] * decay * jnp.einsum("nrhik,nrhjk->nrhij", k, k)
    sides = jnp.concatenate([beta[..., None] * v, beta[..., None] * grown * k], axis=-1)
    # The solver takes the diagonal for ones and does not look above it.
    solved = jax.lax.linalg.triangular_solve(lower, sides, left_side=True, lower=True, unit_diagonal=True)
    own, carried = jnp.split(solved, [value_dim], axis=-1)
    seen = decay * jnp.einsum("nrhik,nrhjk->nrhij", q, k)
    return Chunks(own=own, carried=carried, seen=seen, q=q * grown, k=k * left, kept=grown[..., -1, 0])


def as_tokens(
    out: Float[Array, "chunks rows value_heads chunk value_dim"], count: Int[Array, " rows"], tokens: int
) -> Float[Array, "rows tokens value_heads value_dim"]:
    """The chunks' outputs token by token; zeros for those that do not exist."""
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    out = out.reshape(out.shape[0], -1, *out.shape[3:])[:, :tokens]
    return jnp.where(before(count, tokens)[..., None, None], out, 0)


def convolved(
    qkv: Float[Array, "rows tokens channels"],
    conv_weight: Float[Array, "channels width"],
    conv_inputs: Float[Array, "rows channels taps"],
    live,
) -> Float[Array, "rows tokens channels"]:
    """The causal depthwise convolution after the inputs before it, and silu; of 0 for tokens that do not exist."""
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    tokens, width = qkv.shape[1], conv_weight.shape[1]
    # What a token does not have may be NaN, which no weight of 0 makes harmless.
    qkv = jnp.where(live[..., None], qkv.astype(wide), 0)
    every = jnp.concatenate([conv_inputs.swapaxes(1, 2).astype(wide), qkv], axis=1)
    weight = conv_weight.astype(wide)
    return jax.nn.silu(sum(every[:, tap : tap + tokens] * weight[:, tap] for tap in range(width)))
