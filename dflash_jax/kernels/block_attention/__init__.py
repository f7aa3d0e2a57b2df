"""Attention of new tokens over paged contexts."""

from dflash_jax.kernels.block_attention.api import block_attention

__all__ = ["block_attention"]
