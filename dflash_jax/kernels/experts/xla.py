"""`run_experts` with `jax.lax.ragged_dot`, which is also its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def run_experts(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens chosen"],
    gate_proj: Float[Array, "experts hidden expert_hidden"],
    up_proj: Float[Array, "experts hidden expert_hidden"],
    down_proj: Float[Array, "experts expert_hidden hidden"],
) -> Float[Array, "tokens chosen hidden"]:
    """See `api.run_experts`. Tokens are sorted by expert and multiplied group by group."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=gate_proj.shape[0])
    sorted_tokens = x[order // experts.shape[1]]
    gate = jax.lax.ragged_dot(sorted_tokens, gate_proj, sizes)
    up = jax.lax.ragged_dot(sorted_tokens, up_proj, sizes)
    down = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down_proj, sizes)
    return jnp.zeros_like(down).at[order].set(down).reshape(*experts.shape, -1)
