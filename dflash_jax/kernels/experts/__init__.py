"""The experts of a sparse MLP."""

from dflash_jax.kernels.experts.api import mix_experts

__all__ = ["mix_experts"]
