"""The one table of a model's weights: where each stands in the params and what checkpoints call it.

Loading, saving, counting and Orbax all walk the same list, so that they cannot disagree. The
model's family gives it, as params with a `Leaf` in the place of each array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from dflash_jax.families import FAMILIES, Leaf, StoredTensor, drafts
from dflash_jax.families.leaf import Tensors
from dflash_jax.kernels.compact import is_compact, widened
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.matrix import Matrix
from dflash_jax.models.weights import DraftParams, TargetParams

Config = TargetConfig | DraftConfig
Params = TargetParams | DraftParams


def table(config: Config) -> tuple[Leaf, ...]:
    """Every array of a model, in the order of the params."""
    found = jax.tree_util.tree_leaves_with_path(_leaves(config))
    return tuple(dataclasses.replace(leaf, path=_dotted(keys)) for keys, leaf in found)


def build_params(config: Config, arrays: Mapping[str, Any]) -> Params:
    """Params from an array per path of the config's table, or a matrix; an array of one is [inputs, outputs]."""

    def held(keys: tuple, leaf: Leaf) -> Any:
        array = arrays[_dotted(keys)]
        if not leaf.is_matrix or isinstance(array, Matrix):
            return array
        return Matrix(array, "out_in") if is_compact(array) else Matrix(array)

    return jax.tree_util.tree_map_with_path(held, _leaves(config))


def named_tensors(config: Config, stored: Tensors) -> dict[str, StoredTensor]:
    """A Hugging Face directory's tensors under the table's names."""
    return (
        drafts.tensors(stored) if isinstance(config, DraftConfig) else FAMILIES[config.family].tensors(config, stored)
    )


def packed_tensors(config: Config, tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face directory, from those under the table's names."""
    return dict(tensors) if isinstance(config, DraftConfig) else FAMILIES[config.family].packed(config, tensors)


def param_at(params: Params, path: str) -> Array:
    """The array at a leaf's path, widened if it is compact; a matrix as [inputs, outputs], whatever its layout."""
    node: Any = params
    for step in path.split("."):
        node = node[int(step)] if step.isdigit() else getattr(node, step)
    return node.in_out if isinstance(node, Matrix) else widened(node)


def _leaves(config: Config) -> Params:
    return drafts.params(config) if isinstance(config, DraftConfig) else FAMILIES[config.family].params(config)


def _dotted(keys: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")
