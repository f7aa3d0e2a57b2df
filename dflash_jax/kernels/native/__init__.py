"""C++ for CPUs: products and attention of a few rows, and the page write."""

from __future__ import annotations

from dflash_jax.kernels.native.build import BuildError, available, computes, find_compiler, has_bfloat16, load, machine

__all__ = ["BuildError", "available", "computes", "find_compiler", "has_bfloat16", "load", "machine", "unavailable"]


def unavailable() -> str | None:
    """Why an op has no native code here; None if it has. `available` has said more in the log."""
    return None if available() else "there is no native code here"
