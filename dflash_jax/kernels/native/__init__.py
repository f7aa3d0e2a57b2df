"""C++ for CPUs: products and attention of a few rows."""

from dflash_jax.kernels.native.build import BuildError, available, computes, find_compiler, has_bfloat16, load

__all__ = ["BuildError", "available", "computes", "find_compiler", "has_bfloat16", "load"]
