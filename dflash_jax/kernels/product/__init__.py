"""Products of a few rows with a matrix, on CPUs."""

from dflash_jax.kernels.product.matrix import MOST_ROWS, RowMatrix
from dflash_jax.kernels.product.native import multiplies

__all__ = ["MOST_ROWS", "RowMatrix", "multiplies"]
