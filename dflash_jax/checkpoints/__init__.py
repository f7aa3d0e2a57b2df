"""Checkpoints: files to params and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_jax.lazy import lazy_exports

if TYPE_CHECKING:
    from dflash_jax.checkpoints.description import Description, describe
    from dflash_jax.checkpoints.load import LoadedDraft, LoadedTarget, load_draft, load_target
    from dflash_jax.checkpoints.orbax_io import restore_params, save_params
    from dflash_jax.checkpoints.save import save_draft, save_target
    from dflash_jax.checkpoints.sources import resolve
    from dflash_jax.checkpoints.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "Description",
    "Detokenizer",
    "LoadedDraft",
    "LoadedTarget",
    "Tokenizer",
    "describe",
    "load_draft",
    "load_target",
    "resolve",
    "restore_params",
    "save_draft",
    "save_params",
    "save_target",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "description": ["Description", "describe"],
        "load": ["LoadedDraft", "LoadedTarget", "load_draft", "load_target"],
        "orbax_io": ["restore_params", "save_params"],
        "save": ["save_draft", "save_target"],
        "sources": ["resolve"],
        "tokenizer": ["Detokenizer", "Tokenizer"],
    },
)
