"""The models as a device is fastest with them."""

from __future__ import annotations

from dflash_jax.engine.state import Models
from dflash_jax.kernels import native
from dflash_jax.kernels.dispatch import Implementation, default
from dflash_jax.models.matrix import Matrix, map_matrices


def prepare(models: Models, implementation: Implementation | None) -> Models:
    """The models as the device is fastest with them; from whichever engine they come.

    For native code every matrix lies a row per output, which takes copies of them all but a tied LM head; for all
    else [inputs, outputs]. A matrix that lies so already stays the same array.
    """
    for_native = (implementation or default()) == "native" and native.available()

    def laid_out(matrix: Matrix) -> Matrix:
        return matrix.laid_out("out_in" if for_native and native.computes(matrix.dtype) else "in_out")

    return map_matrices(laid_out, models)
