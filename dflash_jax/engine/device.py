"""The models as a device is fastest with them."""

from __future__ import annotations

import jax
from jaxtyping import Array

from dflash_jax.engine.state import Models
from dflash_jax.kernels import native
from dflash_jax.kernels.choice import Implementation
from dflash_jax.kernels.product import RowMatrix
from dflash_jax.models.weights import is_matrix


def arranged(models: Models, implementation: Implementation | None) -> Models:
    """The models as the device is fastest with them.

    On CPUs that is with a row of each matrix per output, for the native product, which takes copies of them all but a
    tied LM head. Nothing changes where it is not available, where an `implementation` is asked for, and for what
    lies so already.
    """
    if implementation is not None or not native.available():
        return models

    def arrange(path: tuple, leaf: Array | RowMatrix) -> Array | RowMatrix:
        if isinstance(leaf, RowMatrix) or not (is_matrix(path, leaf) and native.computes(leaf.dtype)):
            return leaf
        return RowMatrix(leaf.T)

    target = models.target
    if target.lm_head is None and native.computes(target.embedding.dtype):
        models = models.replace(target=target.replace(lm_head=RowMatrix(target.embedding)))
    leaves, form = jax.tree_util.tree_flatten_with_path(models, is_leaf=lambda leaf: isinstance(leaf, RowMatrix))
    new = [arrange(path, leaf) for path, leaf in leaves]
    unchanged = all(after is before for after, (_, before) in zip(new, leaves, strict=True))
    return models if unchanged else jax.tree.unflatten(form, new)
