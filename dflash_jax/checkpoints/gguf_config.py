"""What a GGUF file says: its metadata checked, its target's config, and its tensors under Hugging Face names."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dflash_jax.checkpoints.hf_config import target_config
from dflash_jax.errors import CheckpointError, quote
from dflash_jax.families import FAMILIES, Family, Gguf, GgufFile, StoredTensor, targets_by_gguf
from dflash_jax.families.leaf import Tensors
from dflash_jax.models.config import TargetConfig
from dflash_jax.schema import Names, Schema, check

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)(\.weight|\.bias|)")
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_ENDS = ("eos", "eot", "eom")
# What ends a turn in published chat templates, for files that do not say which of their tokens does.
_ENDS_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<end_of_utterance>")
# gguf.TokenType.CONTROL
_CONTROL = 3

_Integers = Annotated[list[int], Field(fail_fast=True)]
_Numbers = Annotated[list[float], Field(fail_fast=True)]


class _Keys(Schema):
    """The keys that every file has, or may have."""

    architecture: str | None = Field(default=None, alias="general.architecture")
    chat_template: str | None = Field(default=None, alias="tokenizer.chat_template")
    model: str | None = Field(default=None, alias="tokenizer.ggml.model")
    pre: str | None = Field(default=None, alias="tokenizer.ggml.pre")
    tokens: Names | None = Field(default=None, alias="tokenizer.ggml.tokens")
    merges: Names | None = Field(default=None, alias="tokenizer.ggml.merges")
    scores: _Numbers | None = Field(default=None, alias="tokenizer.ggml.scores")
    token_type: _Integers | None = Field(default=None, alias="tokenizer.ggml.token_type")
    add_bos_token: bool | None = Field(default=None, alias="tokenizer.ggml.add_bos_token")
    add_space_prefix: bool | None = Field(default=None, alias="tokenizer.ggml.add_space_prefix")
    bos: int | None = Field(default=None, alias="tokenizer.ggml.bos_token_id")
    eos: int | None = Field(default=None, alias="tokenizer.ggml.eos_token_id")
    eot: int | None = Field(default=None, alias="tokenizer.ggml.eot_token_id")
    eom: int | None = Field(default=None, alias="tokenizer.ggml.eom_token_id")
    unknown: int | None = Field(default=None, alias="tokenizer.ggml.unknown_token_id")
    padding: int | None = Field(default=None, alias="tokenizer.ggml.padding_token_id")


def check_metadata(metadata: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A file's metadata, with types as they should be and without the ids of tokens that its tokenizer does not have.

    Raises:
      CheckpointError: a value of another type, or types of tokens that are not one for each.
    """
    keys = check(_Keys, metadata, f"the metadata of {file}", error=CheckpointError)
    if keys.tokens is None:
        return dict(metadata)
    count = len(keys.tokens)
    if keys.token_type and len(keys.token_type) != count:
        raise CheckpointError(
            f"the metadata of {file} has {len(keys.token_type)} types (tokenizer.ggml.token_type) for {count} tokens; "
            "each token needs one"
        )
    ids = {_id_key(name): getattr(keys, name) for name in _IDS}
    strange = {key: token for key, token in ids.items() if token is not None and not 0 <= token < count}
    if strange:
        named = ", ".join(f"{key} {quote(token)}" for key, token in strange.items())
        _log.warning("%s: %s outside the vocabulary of %d tokens ignored", file, named, count)
    return {key: value for key, value in metadata.items() if key not in strange}


def gguf_family(metadata: Mapping[str, Any], file: Path) -> tuple[Family, Gguf]:
    """The family of the model in a file, and how GGUF has it. Raises CheckpointError for any other."""
    families, kind = targets_by_gguf(), metadata.get("general.architecture")
    if kind not in families:
        raise CheckpointError(
            f"{file} is of architecture {quote(kind)}, but a GGUF file must be of one of {', '.join(sorted(families))}"
        )
    family = families[kind]
    assert family.gguf is not None
    return family, family.gguf


def gguf_target_config(
    metadata: Mapping[str, Any], tensors: Tensors, file: Path, *, rope_scaling: Mapping[str, Any] | None = None
) -> TargetConfig:
    """The target in a GGUF file.

    Args:
      metadata: as `check_metadata` gives it.
      tensors: its tensors by GGUF name, which say what the metadata does not.
      file: for messages.
      rope_scaling: the user's, in place of the file's.

    Raises:
      CheckpointError, ConfigError: not one that this package can run.
    """
    return target_config(gguf_fields(metadata, tensors, file), source=str(file), rope_scaling=rope_scaling)


def gguf_fields(metadata: Mapping[str, Any], tensors: Tensors, file: Path) -> dict[str, Any]:
    """The same as the fields of a `config.json`."""
    family, gguf = gguf_family(metadata, file)
    return {
        "architectures": list(family.architectures[:1]),
        **gguf.read(GgufFile(metadata, tensors, file)),
        "eos_token_id": _end_tokens(metadata),
    }


def _end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    ids = [metadata[_id_key(name)] for name in _ENDS if _id_key(name) in metadata]
    if _id_key("eot") in metadata:
        return ids
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or [_CONTROL] * len(tokens)
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL}
    return ids + [control[token] for token in _ENDS_OF_TURNS if token in control]


def _id_key(name: str) -> str:
    return f"tokenizer.ggml.{name}_token_id"


def gguf_target_tensors(tensors: Tensors, config: TargetConfig) -> dict[str, StoredTensor]:
    """A GGUF file's tensors by Hugging Face name, laid out as Hugging Face has them."""
    gguf = FAMILIES[config.family].gguf
    assert gguf is not None
    return gguf.tensors(config, {_hf_name(name, gguf): tensor for name, tensor in tensors.items()})


def _hf_name(name: str, gguf: Gguf) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in gguf.names:
        return f"{gguf.names[stem]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match and match[2] in gguf.layer_names:
        return f"model.layers.{match[1]}.{gguf.layer_names[match[2]]}{match[3]}"
    return name
