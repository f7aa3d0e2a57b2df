"""`run_experts` on CPUs, from C++; see `kernels/native/experts.cc`."""

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


def run_experts(
    x: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens chosen"],
    gate_proj: Float[Array, "experts hidden expert_hidden"],
    up_proj: Float[Array, "experts hidden expert_hidden"],
    down_proj: Float[Array, "experts expert_hidden hidden"],
) -> Float[Array, "tokens chosen hidden"]:
    """See `api.run_experts`; a token's results are bitwise the same whatever other tokens there are.

    Only the matrices of experts that a token takes are read. It has no derivative.
    """
    flat, dtype = experts.reshape(-1), jnp.promote_types(x.dtype, gate_proj.dtype)
    tokens = jnp.repeat(x, experts.shape[1], axis=0)
    # XLA's products of 16 bits are of 16 bits, too.
    gate, up = (multiply(tokens, matrices, flat).astype(dtype) for matrices in (gate_proj, up_proj))
    return multiply(jax.nn.silu(gate) * up, down_proj, flat).astype(dtype).reshape(*experts.shape, -1)


def multiply(
    x: Float[Array, "rows inputs"], matrices: Float[Array, "experts inputs outputs"], experts: Int[Array, " rows"]
) -> Float[Array, "rows outputs"]:
    """Each row times the matrix of its expert, in float32."""
    shape = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[2]), jnp.float32)
    call = jax.ffi.ffi_call("dflash_experts", shape, vmap_method="sequential")
    return call(x.astype(jnp.float32), matrices, experts.astype(jnp.int32))
