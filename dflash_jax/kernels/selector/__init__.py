"""A path through the candidates of consecutive positions."""

from dflash_jax.kernels.selector.api import select_path

__all__ = ["select_path"]
