"""Families of models: a file for each, with everything that is specific to it.

Adding one is described in docs/families.md.
"""

from __future__ import annotations

from dflash_jax.families import drafts, llama, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next
from dflash_jax.families.family import Family, Gguf, GgufFile
from dflash_jax.families.leaf import Leaf, StoredTensor

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        qwen3.FAMILY,
        llama.FAMILY,
        qwen3_moe.FAMILY,
        qwen3_5.FAMILY,
        qwen3_5_moe.FAMILY,
        qwen3_next.FAMILY,
    )
}
"""Families of targets by name."""


def targets_by_architecture() -> dict[str, Family]:
    """Families by what `config.json` calls them."""
    return {name: family for family in FAMILIES.values() for name in family.architectures}


def targets_by_gguf() -> dict[str, Family]:
    """Families by what GGUF files call them."""
    return {family.gguf.architecture: family for family in FAMILIES.values() if family.gguf is not None}


__all__ = [
    "FAMILIES",
    "Family",
    "Gguf",
    "GgufFile",
    "Leaf",
    "StoredTensor",
    "drafts",
    "targets_by_architecture",
    "targets_by_gguf",
]
