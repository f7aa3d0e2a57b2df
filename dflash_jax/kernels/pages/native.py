"""`write_tokens` on CPUs, from C++; see `kernels/native/pages.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import native


def unsupported(pool: Float[Array, "layers pages page_size kv_heads head_dim"]) -> str | None:
    """Why there is no native page write here, or None if there is."""
    return native.unavailable()


def slower(pool: Float[Array, "layers pages page_size kv_heads head_dim"]) -> str | None:
    """Why XLA is no slower, or None if it is: of a pool of 16 bits it makes float32, and then 16 bits again."""
    return None if pool.dtype.itemsize == 2 else f"XLA writes {pool.dtype} in place"


def write_tokens(
    pool: Float[Array, "layers pages page_size kv_heads head_dim"],
    values: Float[Array, "layers rows tokens kv_heads head_dim"],
    page: Int[Array, "rows tokens"],
    offset: Int[Array, "rows tokens"],
) -> Float[Array, "layers pages page_size kv_heads head_dim"]:
    """See `api.write_tokens`."""
    shape = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    compute = jax.ffi.ffi_call("dflash_write", shape, input_output_aliases={0: 0})
    return compute(pool, values, page.astype(jnp.int32), offset.astype(jnp.int32))
