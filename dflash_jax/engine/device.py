"""Layout of the weights: what is fastest on a device."""

from __future__ import annotations

from dflash_jax.engine.state import Models
from dflash_jax.kernels import native
from dflash_jax.kernels.dispatch import Implementation, default
from dflash_jax.models.matrix import Matrix, map_matrices


def prepare(models: Models, implementation: Implementation | None) -> Models:
    """The models with every matrix in the layout that the implementation is fastest with.

    Native code takes [outputs, inputs], which copies every matrix but a tied LM head; the other implementations take
    [inputs, outputs]. A matrix that has the layout already stays the same array.
    """
    for_native = (implementation or default()) == "native" and native.available()

    def laid_out(matrix: Matrix) -> Matrix:
        return matrix.laid_out("out_in" if for_native and native.computes(matrix.dtype) else "in_out")

    return map_matrices(laid_out, models)
