"""Qwen3.5 and 3.6, dense: three of four layers are Gated DeltaNet. Of a multimodal checkpoint, the text model."""

from __future__ import annotations

from typing import Any

from dflash_jax.families import gguf, hybrid
from dflash_jax.families.family import Family, Fields, Gguf
from dflash_jax.families.leaf import StoredTensor, Tensors
from dflash_jax.models.config import TargetConfig
from dflash_jax.schema import Heads, check


class Qwen35Fields(hybrid.HybridFields):
    """Defaults are those of transformers' `Qwen3_5TextConfig`."""

    num_key_value_heads: Heads | None = 4


def read(fields: Fields, source: str) -> TargetConfig:
    """The config that a `config.json` describes."""
    return check(Qwen35Fields, fields, source).hybrid(fields, source, family="qwen3_5", moe=lambda index: None)


def write(config: TargetConfig) -> dict[str, Any]:
    """The fields that `read` reads."""
    return hybrid.write(config, "qwen3_5_text")


def from_gguf(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """Tensors as a Hugging Face checkpoint has them."""
    return hybrid.untiled(config, hybrid.from_gguf(config, named))


FAMILY = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    read=read,
    write=write,
    params=hybrid.params,
    tensors=hybrid.tensors,
    packed=hybrid.packed,
    gguf=Gguf("qwen35", hybrid.read_gguf, gguf.NAMES, hybrid.GGUF_NAMES, from_gguf),
)
