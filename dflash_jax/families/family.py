"""What a family of targets is: everything in this package that is specific to one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_jax.families.leaf import StoredTensor, Tensors
from dflash_jax.models.config import TargetConfig
from dflash_jax.models.weights import TargetParams

Fields = Mapping[str, Any]
"""Contents of a `config.json`."""


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A GGUF file.

    Attributes:
      metadata: by key.
      tensors: by GGUF name.
      file: its path, for messages.
    """

    metadata: Mapping[str, Any]
    tensors: Tensors
    file: Path


def _as_they_are(config: TargetConfig, tensors: Tensors) -> dict[str, StoredTensor]:
    return dict(tensors)


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A family in GGUF files.

    Attributes:
      architecture: `general.architecture`.
      read: a file as the fields of a `config.json`.
      names: stems of tensor names (`token_embd`), and what they are called in the table (`model.embed_tokens`).
      layer_names: the same within a layer: `blk.0.attn_q` is `model.layers.0.` and what `attn_q` is here.
      tensors: tensors under the table's names, from tensors under those names laid out as GGUF has them.
    """

    architecture: str
    read: Callable[[GgufFile], Fields]
    names: Mapping[str, str]
    layer_names: Mapping[str, str]
    tensors: Callable[[TargetConfig, Tensors], dict[str, StoredTensor]] = _as_they_are


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of targets.

    Attributes:
      name: `TargetConfig.family` of its members.
      architectures: what `config.json` may call it; the first is what is written.
      read: a config from the fields of a `config.json`; the second argument is the file, for messages.
      write: the fields of a `config.json` from a config, without `architectures` and `dtype`.
      params: the params of a config, with a `Leaf` in the place of each array.
      tensors: tensors under the names that `params` gives, from those of a Hugging Face checkpoint.
      packed: the inverse of `tensors`: what a Hugging Face checkpoint holds, from tensors under the names that
        `params` gives.
      gguf: how GGUF has it, if this package reads that.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Fields, str], TargetConfig]
    write: Callable[[TargetConfig], dict[str, Any]]
    params: Callable[[TargetConfig], TargetParams]
    tensors: Callable[[TargetConfig, Tensors], dict[str, StoredTensor]] = _as_they_are
    packed: Callable[[TargetConfig, Tensors], dict[str, StoredTensor]] = _as_they_are
    gguf: Gguf | None = None
