"""`mix_experts` in plain XLA, which is also its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_PIECE = 512
"""Tokens at a time. The memory that they take grows with the number of experts."""


def mix_experts(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens chosen"],
    shares: Float[Array, "tokens chosen"],
    gate_proj: Float[Array, "experts hidden expert_hidden"],
    up_proj: Float[Array, "experts hidden expert_hidden"],
    down_proj: Float[Array, "experts expert_hidden hidden"],
) -> Float[Array, "tokens hidden"]:
    """See `api.mix_experts`. All experts compute all tokens, and a share is 0 where a token does not take one.

    `jax.lax.ragged_dot` does the same on CPUs and GPUs, for each token as often as it has experts.
    """
    matrices, tokens = (gate_proj, up_proj, down_proj), x.shape[0]
    if tokens <= _PIECE:
        return _mix(x, experts, shares, *matrices)
    pieces = -(-tokens // _PIECE)

    def split(array: Array) -> Array:
        return jnp.pad(array, ((0, pieces * _PIECE - tokens), (0, 0))).reshape(pieces, _PIECE, -1)

    mixed = jax.lax.map(lambda of: _mix(of[0], of[1], of[2], *matrices), (split(x), split(experts), split(shares)))
    return mixed.reshape(-1, x.shape[1])[:tokens]


def _mix(x, experts, shares, gate_proj, up_proj, down_proj) -> Float[Array, "tokens hidden"]:
    taken = jax.nn.one_hot(experts, gate_proj.shape[0], axis=0, dtype=shares.dtype)
    of_all = (taken * shares).sum(-1)[..., None]
    tokens = jnp.broadcast_to(x, (gate_proj.shape[0], *x.shape))
    gate, up = (jnp.einsum("eth,ehi->eti", tokens, matrices) for matrices in (gate_proj, up_proj))
    # What a token does not take may be infinite, and 0 times that is NaN.
    inner = jnp.where(of_all != 0, jax.nn.silu(gate) * up * of_all, 0).astype(gate.dtype)
    return jnp.einsum("eti,eih->th", inner, down_proj, preferred_element_type=jnp.float32)
