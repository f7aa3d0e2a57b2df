"""Qwen3.5-MoE and 3.6-MoE: Qwen3.5 with experts in every layer, one of which all tokens share."""

from __future__ import annotations

from typing import Any

from dflash_jax.families import gguf, hybrid, parts
from dflash_jax.families.family import Family, Fields, Gguf, GgufFile
from dflash_jax.families.leaf import StoredTensor, Tensors
from dflash_jax.models.config import TargetConfig
from dflash_jax.schema import Heads, Width, check


class Qwen35MoeFields(hybrid.HybridFields, hybrid.MoeFields):
    """Defaults are those of transformers' `Qwen3_5MoeTextConfig`.

    It has no `intermediate_size`, which no layer of the target uses; a fresh draft takes it for its own.
    """

    num_key_value_heads: Heads | None = 2
    num_experts_per_tok: hybrid.Experts = 8
    num_experts: hybrid.Experts = 256
    # Every MLP is a mixture of experts, so configs leave it out.
    intermediate_size: Width | None = None  # type: ignore[assignment]


def read(fields: Fields, source: str) -> TargetConfig:
    """The config that a `config.json` describes."""
    found = check(Qwen35MoeFields, fields, source)
    moe = found.moe(source)
    if found.intermediate_size is None:
        # Of all the experts that a token passes.
        inner = moe.experts_per_token * moe.intermediate_size + found.shared_expert_intermediate_size
        found = found.model_copy(update={"intermediate_size": inner})
    return found.hybrid(fields, source, family="qwen3_5_moe", moe=lambda index: moe)


def write(config: TargetConfig) -> dict[str, Any]:
    """The fields that `read` reads."""
    return {**hybrid.write(config, "qwen3_5_moe_text"), **hybrid.write_moe(config)}


def read_gguf(file: GgufFile) -> Fields:
    """The fields of a `config.json` that a GGUF file's metadata says."""
    return {**hybrid.read_gguf(file), **hybrid.read_gguf_moe(file)}


def from_gguf(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """Tensors as a Hugging Face checkpoint has them, and a tensor per expert."""
    return parts.split_experts(hybrid.untiled(config, hybrid.from_gguf(config, named)))


FAMILY = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    read=read,
    write=write,
    params=hybrid.params,
    tensors=hybrid.tensors,
    packed=hybrid.packed,
    gguf=Gguf("qwen35moe", read_gguf, gguf.NAMES, hybrid.GGUF_NAMES, from_gguf),
)
