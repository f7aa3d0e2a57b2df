"""Saving targets and drafts in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_jax.checkpoints.hf_config import config_fields
from dflash_jax.checkpoints.safetensors_io import write_directory
from dflash_jax.checkpoints.staging import new_directory
from dflash_jax.checkpoints.table import Config, Params
from dflash_jax.checkpoints.tensors import disassemble
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.weights import DraftParams, TargetParams

_SHARD_BYTES = 5 * 10**9


def save_draft(
    directory: str | Path,
    config: DraftConfig,
    params: DraftParams,
    dtype: str = "float32",
    *,
    max_shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Saves a draft as the reference package `dflash` loads it (`DFlash2DraftModel.from_pretrained`).

    Args:
      directory: where to; it must not exist, or be empty. It appears only when complete.
      config, params: the draft.
      dtype: "float32" or "bfloat16"; the weights are cast to it.
      max_shard_bytes: the weights are split into files of at most this size.

    Returns:
      The directory.

    Raises:
      CheckpointError: the directory has something in it, or the params do not fit the config.
      ConfigError: a config that the format cannot say.
    """
    return _save(Path(directory), config, params, dtype, max_shard_bytes)


def save_target(
    directory: str | Path,
    config: TargetConfig,
    params: TargetParams,
    dtype: str = "float32",
    *,
    max_shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Saves a target as transformers loads it; arguments and errors as of `save_draft`."""
    return _save(Path(directory), config, params, dtype, max_shard_bytes)


def _save(directory: Path, config: Config, params: Params, dtype: str, max_shard_bytes: int) -> Path:
    fields, tensors = config_fields(config, dtype), list(disassemble(config, params, dtype))
    with new_directory(directory) as scratch:
        write_directory(scratch, tensors, max_shard_bytes)
        (scratch / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return directory
