"""The experts of a sparse MLP."""

from dflash_jax.kernels.experts.api import run_experts

__all__ = ["run_experts"]
