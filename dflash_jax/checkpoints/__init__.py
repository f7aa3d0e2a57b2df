"""Checkpoints: files to params and back."""

from dflash_jax.checkpoints.describe import Description, describe
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
