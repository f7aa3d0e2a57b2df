"""A matrix arranged so that few rows are multiplied by it as fast as it can be read."""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.product import native

# Of more rows, XLA's products are as fast or faster.
MOST_ROWS = 16


class RowMatrix(struct.PyTreeNode):
    """A matrix with a row per output, that stands where an array [inputs, outputs] does: `x @ matrix` multiplies by it.

    Up to `MOST_ROWS` rows of x take the native product, which needs `native.available()`, and more take XLA's.
    A tied embedding lies so already, and its rows can be looked up as in an array.
    """

    value: Float[Array, "outputs inputs"]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights."""
        return self.value.dtype

    def __getitem__(self, outputs: Int[Array, "*batch"]) -> Float[Array, "*batch inputs"]:
        return self.value[outputs]

    def __rmatmul__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        return self.product(x).astype(jnp.promote_types(x.dtype, self.dtype))

    def product(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """x @ matrix with its sums as they are, in float32 or better."""
        wide = jnp.promote_types(jnp.promote_types(x.dtype, self.dtype), jnp.float32)
        if math.prod(x.shape[:-1]) <= MOST_ROWS and wide == jnp.float32:
            return native.multiply(x.reshape(-1, x.shape[-1]), self.value).reshape(*x.shape[:-1], -1)
        return jnp.matmul(x, self.value.T, preferred_element_type=wide)
