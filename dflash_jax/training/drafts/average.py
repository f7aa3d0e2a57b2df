"""The mean of drafts that were trained from one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from dflash_jax.checkpoints import load_draft, save_draft
from dflash_jax.errors import ConfigError


def average_drafts(paths: Sequence[str | Path], directory: str | Path, dtype: str = "bfloat16") -> None:
    """Saves the mean of the weights of several drafts, in Hugging Face layout.

    A draft and one that was trained on from it, on other text, are often worse than their mean (model soups,
    arXiv 2203.05482). Drafts from different beginnings have no useful mean.

    Args:
      paths: the drafts, as `load_draft` takes them; one that is given twice counts twice.
      directory: of the mean; it must not exist, or be empty.
      dtype: of the saved weights; the mean is taken in float32.

    Raises:
      ConfigError: fewer than two, or drafts of different configs.
      CheckpointError: one of them cannot be loaded, or the directory has something in it.
    """
    if len(paths) < 2:
        raise ConfigError(f"a mean is of two drafts or more, and {len(paths)} was given")
    first, *others = [load_draft(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        if other.config != first.config:
            raise ConfigError(
                f"{path} is not of the same config as {paths[0]}, and only drafts of one config have a mean"
            )
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), first.params, *(draft.params for draft in others))
    save_draft(directory, first.config, mean, dtype)
