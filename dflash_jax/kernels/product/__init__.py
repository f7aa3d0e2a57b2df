"""Products of a few rows with a matrix, on CPUs."""

from dflash_jax.kernels.product.matrix import MOST_ROWS, RowMatrix

__all__ = ["MOST_ROWS", "RowMatrix"]
