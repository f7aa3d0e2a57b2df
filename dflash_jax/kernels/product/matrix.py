"""A matrix arranged so that few rows are multiplied by it as fast as it can be read."""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dflash_jax.kernels import native
from dflash_jax.kernels.product.native import multiply

# Of more rows, XLA's products are as fast or faster; in bfloat16 only on processors that multiply it, elsewhere they
# take eight times as long.
MOST_ROWS = 16


class RowMatrix(struct.PyTreeNode):
    """A matrix kept a row per output, by which `x @ matrix` multiplies a JAX array [..., inputs].

    Up to `MOST_ROWS` rows of x take the native product, if it is `native.available()` and has the dtypes, and so do
    more in bfloat16 where the processor cannot multiply it; that has no derivative. All else is XLA's.
    """

    value: Float[Array, "outputs inputs"]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights."""
        return self.value.dtype

    def __rmatmul__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        return self.product(x).astype(jnp.promote_types(x.dtype, self.dtype))

    def product(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """x @ matrix with its sums as they are, in float32 or better."""
        rows = math.prod(x.shape[:-1])
        slow = jnp.promote_types(x.dtype, self.dtype) == jnp.bfloat16 and not native.has_bfloat16()
        if (rows <= MOST_ROWS or slow) and native.computes(x.dtype, self.dtype) and native.available():
            flat = multiply(x.reshape(rows, x.shape[-1]), self.value)
            return flat.reshape(*x.shape[:-1], flat.shape[-1])
        wide = jnp.promote_types(jnp.promote_types(x.dtype, self.dtype), jnp.float32)
        return jnp.matmul(x, self.value.T, preferred_element_type=wide)
