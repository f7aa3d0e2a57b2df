"""Tokens' keys or values into their pages."""

from dflash_jax.kernels.pages.api import write_tokens

__all__ = ["write_tokens"]
