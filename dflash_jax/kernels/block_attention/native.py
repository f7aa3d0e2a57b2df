"""`block_attention` of few tokens on CPUs, from C++; see `kernels/native/attention.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import native

# With more, XLA's products of whole chunks are as fast.
MOST_QUERIES = 16
# Positions are 32 bits.
_NO_WINDOW = 2**31 - 1


def unsupported(
    q: Float[Array, "rows queries heads head_dim"],
    k_block: Float[Array, "rows queries kv_heads head_dim"],
    v_block: Float[Array, "rows queries kv_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
) -> str | None:
    """Why these operands cannot be computed here, or None if they can."""
    cached = {x.dtype for x in (k_block, v_block, k_pages, v_pages)}
    if len(cached) > 1 or not native.computes(q.dtype, *cached):
        return (
            f"queries {q.dtype} and keys and values {', '.join(sorted(str(dtype) for dtype in cached))} "
            "are not float32 or bfloat16, keys and values alike"
        )
    return native.unavailable()


def slower(
    q: Float[Array, "rows queries heads head_dim"],
    k_block: Float[Array, "rows queries kv_heads head_dim"],
    v_block: Float[Array, "rows queries kv_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
) -> str | None:
    """Why XLA is no slower, or None if it is."""
    return None if q.shape[1] <= MOST_QUERIES else f"{q.shape[1]} queries are more than {MOST_QUERIES}"


def block_attention(
    q: Float[Array, "rows queries heads head_dim"],
    k_block: Float[Array, "rows queries kv_heads head_dim"],
    v_block: Float[Array, "rows queries kv_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    block_table: Int[Array, "slots slot_pages"],
    idx_mapping: Int[Array, " rows"],
    context_len: Int[Array, " slots"],
    q_len: Int[Array, " rows"],
    *,
    layer: int,
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Array, "rows queries heads head_dim"]:
    """See `api.block_attention`; for finite values, a token's result is bitwise the same alone and in a block.

    Only where `kernels.native.available`, in float32 and bfloat16. It has no derivative.
    """
    indices = (x.astype(jnp.int32) for x in (block_table, idx_mapping, context_len, q_len))
    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    compute = jax.ffi.ffi_call("dflash_attend", shape, vmap_method="sequential")
    out = compute(
        q.astype(jnp.float32),
        k_block,
        v_block,
        k_pages,
        v_pages,
        *indices,
        layer=np.int64(layer),
        window=np.int64(_NO_WINDOW if window is None else min(window, _NO_WINDOW)),
        causal=causal,
        scale=np.float32(scale),
    )
    return out.astype(q.dtype)
