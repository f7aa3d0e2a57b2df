"""The product from C++; see `kernels/native/product.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def multiply(x: Float[Array, "rows inputs"], matrix: Float[Array, "outputs width"]) -> Float[Array, "rows outputs"]:
    """x @ matrix.T in float32; each row's result is the same bits alone and in company.

    Only where `kernels.native.available`, and for the dtypes it `computes` with.

    Raises:
      TypeError: rows of different length.
    """
    if x.shape[1] != matrix.shape[1]:
        raise TypeError(f"rows of {x.shape[1]} values cannot be multiplied by a matrix with rows of {matrix.shape[1]}")
    shape = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("dflash_multiply", shape, vmap_method="sequential")(x.astype(jnp.float32), matrix)
