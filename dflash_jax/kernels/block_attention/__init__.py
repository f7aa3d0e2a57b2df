"""Attention of new tokens over paged contexts."""

from dflash_jax.kernels.block_attention.api import Implementation, block_attention

__all__ = ["Implementation", "block_attention"]
