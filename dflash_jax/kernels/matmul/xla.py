"""`matmul` in plain XLA operations, which is also its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.matmul.api import Layout

_PADDING = 32


def matmul(
    x: Float[Array, "*batch inputs"],
    matrix: Float[Array, "rows columns"] | Compact,
    *,
    layout: Layout,
    mixed: bool,
    wide: bool,
) -> Float[Array, "*batch outputs"]:
    """See `api.matmul`. A compact matrix is widened to float32 for each product."""
    if isinstance(matrix, Compact):
        narrow = jnp.promote_types(x.dtype, matrix.dtype)
        x, matrix = x.astype(jnp.promote_types(narrow, jnp.float32)), matrix.astype(jnp.float32)
        out = matmul(x, matrix, layout=layout, mixed=mixed, wide=True)
        return out if wide else out.astype(narrow)
    if mixed:
        flat = mixed_matmul(x.reshape(-1, x.shape[-1]), matrix if layout == "in_out" else matrix.T)
        return flat.reshape(*x.shape[:-1], flat.shape[-1])
    narrow = jnp.promote_types(x.dtype, matrix.dtype)
    sums = jnp.promote_types(narrow, jnp.float32)
    if layout == "out_in":
        out = jnp.matmul(x, matrix.T, preferred_element_type=sums)
        return out if wide else out.astype(narrow)
    return jnp.matmul(x, matrix, preferred_element_type=sums) if wide else jnp.matmul(x, matrix)


@jax.custom_vjp
def mixed_matmul(
    x: Float[Array, "rows inputs"], matrix: Float[Array, "inputs outputs"]
) -> Float[Array, "rows outputs"]:
    """x @ matrix, and gradients, from bfloat16 factors with float32 sums."""
    return _dot(x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16))


def _forward(x, matrix):
    x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    return _dot(x, matrix), (x, matrix)


def _backward(residuals, gradient):
    x, matrix = residuals
    gradient = gradient.astype(jnp.bfloat16)
    # XLA's fast bfloat16 product on CPUs takes no transposed left operand. The padding, which adds zeros to
    # sums, keeps the transpose from being folded into the product.
    turned = jnp.pad(x.T, ((0, 0), (0, _PADDING)))
    return _dot_transposed(gradient, matrix), _dot(turned, jnp.pad(gradient, ((0, _PADDING), (0, 0))))


mixed_matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def mixed_products(x: Float[Array, "rows inputs"], table: Float[Array, "others inputs"]) -> Float[Array, "rows others"]:
    """x @ table.T in the same precision. The table is a constant: no gradient reaches it."""
    return _dot_transposed(x.astype(jnp.bfloat16), table.astype(jnp.bfloat16))


def _products_forward(x, table):
    return mixed_products(x, table), table


def _products_backward(table, gradient):
    return _dot(gradient.astype(jnp.bfloat16), table.astype(jnp.bfloat16)), None


mixed_products.defvjp(_products_forward, _products_backward)


def _dot(left, right):
    return jax.lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_transposed(left, right):
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
