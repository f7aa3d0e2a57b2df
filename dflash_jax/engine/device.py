"""What is fastest on a device: the layout of the weights, and XLA's options."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dflash_jax.engine.state import Models
from dflash_jax.kernels import native
from dflash_jax.kernels.dispatch import Implementation, default
from dflash_jax.kernels.matmul import Layout
from dflash_jax.models.matrix import Matrix, map_matrices


def default_weights() -> str | None:
    """How a target's weights are held unless a config says: as they are stored where products read them so."""
    return "file" if default() == "native" and native.available() else None


def prepare(models: Models, implementation: Implementation | None) -> Models:
    """The models with every matrix in the layout that the implementation is fastest with.

    Native code takes [outputs, inputs], which copies every matrix but a tied LM head; the other implementations take
    [inputs, outputs]. A matrix that has the layout already stays the same array, and a compact one as it is.
    """

    def laid_out(matrix: Matrix) -> Matrix:
        return matrix if matrix.is_compact else matrix.laid_out(fastest_layout(matrix.dtype, implementation))

    return map_matrices(laid_out, models)


def fastest_layout(dtype: jnp.dtype, implementation: Implementation | None) -> Layout:
    """The layout of matrices that the implementation is fastest with."""
    for_native = (implementation or default()) == "native" and native.available()
    return "out_in" if for_native and native.computes(dtype) else "in_out"


GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
"""XLA's options for GPUs.

Products that share an input are merged into one if one of them has a matrix of at most so many megabytes. XLA copies
the matrices into one for that, in every step: nearly all of an attention or Gated DeltaNet layer's projections.
"""


def compiler_options() -> dict[str, int] | None:
    """XLA's options for programs of the default backend, as `jax.jit` takes them."""
    return GPU_OPTIONS if jax.default_backend() == "gpu" else None
