"""Tokens' keys or values into their pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import native


def write_tokens(
    pool: Float[Array, "layers pages page_size kv_heads head_dim"],
    values: Float[Array, "layers rows tokens kv_heads head_dim"],
    page: Int[Array, "rows tokens"],
    offset: Int[Array, "rows tokens"],
) -> Float[Array, "layers pages page_size kv_heads head_dim"]:
    """The pool with each token's values, rounded to its dtype, at its place; in the same memory if it is donated.

    Args:
      pool: of all layers.
      values: of the tokens.
      page: where each belongs; a token whose page the pool does not have is dropped.
      offset: the place in the page.
    """
    values = values.astype(pool.dtype)
    # XLA's scatter on CPUs makes float32 of a whole pool of 16 bits, and then 16 bits of it again.
    if pool.dtype.itemsize == 2 and native.available():
        shape = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
        compute = jax.ffi.ffi_call("dflash_write", shape, input_output_aliases={0: 0})
        return compute(pool, values, page.astype(jnp.int32), offset.astype(jnp.int32))
    return pool.at[:, page, offset].set(values, mode="drop")
