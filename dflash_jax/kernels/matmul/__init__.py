"""A matrix product whose matrix may be kept in either layout."""

from dflash_jax.kernels.matmul.api import Layout, matmul

__all__ = ["Layout", "matmul"]
