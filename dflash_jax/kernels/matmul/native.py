"""`matmul` of a few rows on CPUs, from C++; see `kernels/native/matmul.cc`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.kernels import native
from dflash_jax.kernels.matmul.api import Layout

# Of more rows, XLA's products are as fast or faster; in bfloat16 only on processors that multiply it, elsewhere they
# take eight times as long.
MOST_ROWS = 16


def unsupported(
    x: Float[Array, "*batch inputs"], matrix: Float[Array, "rows columns"], layout: Layout, mixed: bool
) -> str | None:
    """Why these operands cannot be multiplied here, or None if they can."""
    if layout != "out_in":
        return "the matrix is not in native layout, [outputs, inputs]"
    if not native.computes(x.dtype, matrix.dtype):
        return f"{x.dtype} and {matrix.dtype} are not both float32 or bfloat16"
    return native.unavailable()


def slower(
    x: Float[Array, "*batch inputs"], matrix: Float[Array, "rows columns"], layout: Layout, mixed: bool
) -> str | None:
    """Why XLA is no slower, or None if it is."""
    rows = math.prod(x.shape[:-1])
    if rows <= MOST_ROWS:
        return None
    short = mixed or jnp.promote_types(x.dtype, matrix.dtype) == jnp.bfloat16
    return None if short and not native.has_bfloat16() else f"{rows} rows are more than {MOST_ROWS}"


def matmul(
    x: Float[Array, "*batch inputs"],
    matrix: Float[Array, "outputs inputs"],
    *,
    layout: Layout,
    mixed: bool,
    wide: bool,
) -> Float[Array, "*batch outputs"]:
    """See `api.matmul`; each row's result is bitwise the same whatever other rows there are."""
    narrow = jnp.float32 if mixed else jnp.promote_types(x.dtype, matrix.dtype)
    if mixed:
        x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    flat = multiply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), matrix)
    out = flat.reshape(*x.shape[:-1], flat.shape[-1])
    return out if wide else out.astype(narrow)


def multiply(x: Float[Array, "rows inputs"], matrix: Float[Array, "outputs width"]) -> Float[Array, "rows outputs"]:
    """x @ matrix.T in float32.

    Only where `kernels.native.available`, and for the dtypes it `computes` with.

    Raises:
      TypeError: rows of different length.
    """
    if x.shape[1] != matrix.shape[1]:
        raise TypeError(f"rows of {x.shape[1]} values cannot be multiplied by a matrix with rows of {matrix.shape[1]}")
    shape = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("dflash_multiply", shape, vmap_method="sequential")(x.astype(jnp.float32), matrix)
