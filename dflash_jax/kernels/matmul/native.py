"""`matmul` on CPUs, from C++; see `kernels/native/matmul.cc`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax.kernels import native
from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.matmul.api import Layout

MOST_ROWS = 32
"""Of more rows, XLA's product of float32 is as fast or faster."""

MOST_SHORT = 160
"""And of more than these, it is after a matrix that is kept otherwise was widened for it."""

_TILE = 1 << 22
"""Weights that are widened at a time for XLA's product."""


def unsupported(
    x: Float[Array, "*batch inputs"], matrix: Float[Array, "rows columns"] | Compact, layout: Layout, mixed: bool
) -> str | None:
    """Why these operands cannot be multiplied here, or None if they can."""
    if layout != "out_in":
        return "the matrix is not in native layout, [outputs, inputs]"
    if isinstance(matrix, Compact) and mixed:
        return "a compact matrix has no product of factors rounded to bfloat16"
    if not native.computes(x.dtype, matrix.dtype):
        return f"{x.dtype} and {matrix.dtype} are not both float32 or bfloat16"
    return native.unavailable()


def slower(
    x: Float[Array, "*batch inputs"], matrix: Float[Array, "rows columns"] | Compact, layout: Layout, mixed: bool
) -> str | None:
    """Why XLA is no slower, or None if it is."""
    if isinstance(matrix, Compact):
        return None
    rows = math.prod(x.shape[:-1])
    if rows <= MOST_ROWS:
        return None
    if mixed or jnp.promote_types(x.dtype, matrix.dtype) == jnp.bfloat16:
        return "the processor multiplies bfloat16" if native.has_bfloat16() and rows > MOST_SHORT else None
    return f"{rows} rows are more than {MOST_ROWS}"


def matmul(
    x: Float[Array, "*batch inputs"],
    matrix: Float[Array, "outputs inputs"] | Compact,
    *,
    layout: Layout,
    mixed: bool,
    wide: bool,
) -> Float[Array, "*batch outputs"]:
    """See `api.matmul`; of few rows each one's result is bitwise the same whatever others there are."""
    narrow = jnp.float32 if mixed else jnp.promote_types(x.dtype, matrix.dtype)
    if mixed and not isinstance(matrix, Compact):
        x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if rows.shape[0] > MOST_SHORT and (isinstance(matrix, Compact) or matrix.dtype == jnp.bfloat16):
        flat = _multiply_widened(rows.astype(jnp.float32), matrix)
    else:
        flat = multiply_codes(rows, matrix) if isinstance(matrix, Compact) else multiply(rows, matrix)
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


def multiply_codes(x: Float[Array, "rows inputs"], matrix: Compact) -> Float[Array, "rows outputs"]:
    """x @ matrix.T in float32, each weight widened exactly; see `multiply`.

    Raises:
      TypeError: rows of different length.
    """
    outputs, inputs = matrix.shape
    if x.shape[1] != inputs:
        raise TypeError(f"rows of {x.shape[1]} values cannot be multiplied by a matrix with rows of {inputs}")
    call = jax.ffi.ffi_call(
        "dflash_multiply_codes", jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32), vmap_method="sequential"
    )
    return call(x.astype(jnp.float32), matrix.codes, matrix.scales, format=matrix.format, group=np.int64(matrix.group))


def widen(matrix: Compact) -> Float[Array, "outputs inputs"]:
    """All weights in float32."""
    call = jax.ffi.ffi_call("dflash_widen", jax.ShapeDtypeStruct(matrix.shape, jnp.float32), vmap_method="sequential")
    return call(matrix.codes, matrix.scales, format=matrix.format, group=np.int64(matrix.group))


def _multiply_widened(
    x: Float[Array, "rows inputs"], matrix: Float[Array, "outputs inputs"] | Compact
) -> Float[Array, "rows outputs"]:
    """XLA's product of float32 with some outputs of the matrix after the other, each part widened for it."""
    outputs, inputs = matrix.shape
    fitting = (n for n in range(1, outputs) if outputs % n == 0 and outputs // n * inputs <= _TILE)
    parts = next(fitting, max(outputs, 1))

    def product(part: Float[Array, "some inputs"] | Compact) -> Float[Array, "rows some"]:
        values = widen(part) if isinstance(part, Compact) else part.astype(jnp.float32)
        return jnp.matmul(x, values.T)

    if parts == 1:
        return product(matrix)
    cut = jax.tree.map(lambda array: array.reshape(parts, outputs // parts, *array.shape[1:]), matrix)
    return jax.lax.map(product, cut).swapaxes(0, 1).reshape(x.shape[0], outputs)
