"""Training in mixed precision: matrices are multiplied in bfloat16 and summed in float32; all else is float32."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import PyTree

from dflash_jax.models.lm_head import target_head
from dflash_jax.models.matrix import map_matrices
from dflash_jax.models.weights import TargetParams
from dflash_jax.training.values import Dtype


def in_precision(params: PyTree, dtype: Dtype) -> PyTree:
    """Weights that compute in the given precision; their gradients are float32 all the same."""
    return params if dtype == "float32" else map_matrices(lambda matrix: matrix.replace(mixed=True), params)


def rounded(target: TargetParams, dtype: Dtype) -> TargetParams:
    """A target that only runs forward, computing in the given precision.

    The matrices of its layers and its LM head are kept in bfloat16; everything between products stays float32.
    """
    if dtype == "float32":
        return target
    layers = map_matrices(
        lambda matrix: matrix.replace(value=matrix.value.astype(jnp.bfloat16), mixed=True), target.layers
    )
    head = target_head(target).weight
    return target.replace(layers=layers, lm_head=head.replace(value=head.value.astype(jnp.bfloat16)))
