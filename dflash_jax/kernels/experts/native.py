"""`mix_experts` on CPUs, from C++; see `kernels/native/experts.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import native


def unsupported(
    x: Float[Array, "tokens hidden"], gate_proj: Float[Array, "experts hidden expert_hidden"]
) -> str | None:
    """Why these operands cannot be multiplied here, or None if they can."""
    if not native.computes(x.dtype, gate_proj.dtype):
        return f"{x.dtype} and {gate_proj.dtype} are not both float32 or bfloat16"
    return native.unavailable()


def mix_experts(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens chosen"],
    shares: Float[Array, "tokens chosen"],
    gate_proj: Float[Array, "experts hidden expert_hidden"],
    up_proj: Float[Array, "experts hidden expert_hidden"],
    down_proj: Float[Array, "experts expert_hidden hidden"],
) -> Float[Array, "tokens hidden"]:
    """See `api.mix_experts`; a token's result is bitwise the same whatever other tokens there are.

    Only the matrices of experts that a token takes are read. It has no derivative.
    """
    flat, dtype = experts.reshape(-1), jnp.promote_types(x.dtype, gate_proj.dtype)
    tokens = jnp.repeat(x, experts.shape[1], axis=0)
    # XLA's products of 16 bits are of 16 bits, too.
    gate, up = (multiply(tokens, matrices, flat).astype(dtype) for matrices in (gate_proj, up_proj))
    down = multiply(jax.nn.silu(gate) * up, down_proj, flat)
    return _weighted_sum(down.reshape(*experts.shape, -1), shares)


def _weighted_sum(
    values: Float[Array, "tokens chosen hidden"], shares: Float[Array, "tokens chosen"]
) -> Float[Array, "tokens hidden"]:
    """The sum, added in order.

    Of the first two products the compiler could fuse either with the addition, and choose otherwise for other
    numbers of tokens; a product behind a condition cannot be fused.
    """
    shares = shares[..., None]
    total = jnp.where(shares[:, 0] != 0, shares[:, 0] * values[:, 0], 0)
    for place in range(1, values.shape[1]):
        total = total + shares[:, place] * values[:, place]
    return total


def multiply(
    x: Float[Array, "rows inputs"], matrices: Float[Array, "experts inputs outputs"], experts: Int[Array, " rows"]
) -> Float[Array, "rows outputs"]:
    """Each row times the matrix of its expert, in float32."""
    shape = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[2]), jnp.float32)
    call = jax.ffi.ffi_call("dflash_experts", shape, vmap_method="sequential")
    return call(x.astype(jnp.float32), matrices, experts.astype(jnp.int32))
