"""Qwen3-MoE: Qwen3 with a mixture of experts in place of some or all dense MLPs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from dflash_jax.errors import ConfigError
from dflash_jax.families import fields as shared
from dflash_jax.families import gguf, parts
from dflash_jax.families.family import Family, Fields, Gguf, GgufFile
from dflash_jax.families.leaf import StoredTensor, Tensors
from dflash_jax.models.config import LayerConfig, MoeConfig, TargetConfig
from dflash_jax.models.weights import TargetParams
from dflash_jax.schema import Heads, LayerIndex, Layers, Positions, Schema, Width, check

Experts = Annotated[int, Field(ge=0, le=4096)]
"""Experts of a layer."""


class Qwen3MoeFields(shared.TargetFields):
    """Defaults are those of transformers' `Qwen3MoeConfig`."""

    num_key_value_heads: Heads | None = 4
    max_position_embeddings: Positions = 32768
    sliding_window: Positions | None = 4096
    use_sliding_window: bool | None = None
    num_experts: Experts = 128
    num_local_experts: Experts | None = None
    num_experts_per_tok: Experts = 8
    moe_intermediate_size: Width = 768
    norm_topk_prob: bool | None = False
    decoder_sparse_step: Layers = 1
    mlp_only_layers: Annotated[list[LayerIndex], Field(fail_fast=True)] | None = None

    def moe(self, source: str) -> MoeConfig:
        """The mixture of experts of a layer that has one."""
        experts = self.num_experts if self.num_local_experts is None else self.num_local_experts
        if not 1 <= self.num_experts_per_tok <= max(experts, 1):
            raise ConfigError(
                f"num_experts_per_tok in {source} is {self.num_experts_per_tok}, but it must be from 1 to the "
                f"number of experts, {experts}"
            )
        return MoeConfig(experts, self.num_experts_per_tok, self.moe_intermediate_size, bool(self.norm_topk_prob))


def read(fields: Fields, source: str) -> TargetConfig:
    """The config that a `config.json` describes."""
    found = check(Qwen3MoeFields, fields, source)
    window = found.sliding_window if found.use_sliding_window else None
    moe, dense = found.moe(source), found.mlp_only_layers or ()

    def layer(index: int) -> LayerConfig:
        sparse = index not in dense and moe.num_experts > 0 and (index + 1) % found.decoder_sparse_step == 0
        return LayerConfig(window=window, moe=moe if sparse else None)

    layers = tuple(layer(index) for index in range(found.num_hidden_layers))
    return found.target(fields, source, family="qwen3_moe", layers=layers, qk_norm=True)


def write(config: TargetConfig) -> dict[str, Any]:
    """The fields that `read` reads. Raises ConfigError for layers that differ in ways these cannot say."""
    windows = {layer.window for layer in config.layers}
    kinds = {layer.moe for layer in config.layers if layer.moe is not None}
    if len(windows) > 1 or len(kinds) != 1:
        raise ConfigError("a qwen3_moe config.json needs the same window and the same experts in every layer")
    window, moe = windows.pop(), kinds.pop()
    return {
        **shared.write_target(config),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, layer in enumerate(config.layers) if layer.moe is None],
    }


def params(config: TargetConfig) -> TargetParams:
    """Where each tensor belongs."""

    def layer(index: int):
        name, moe = f"model.layers.{index}", config.layers[index].moe
        sparse = parts.sparse_mlp(moe, config.hidden_size, f"{name}.mlp") if moe is not None else None
        return parts.decoder_layer(config, name, sparse or parts.dense_mlp(config, f"{name}.mlp"))

    return parts.target_params(config, layer)


def tensors(config: TargetConfig, stored: Tensors) -> dict[str, StoredTensor]:
    """A tensor per expert and projection, from stacks of them too."""
    return parts.split_experts(stored)


class _Keys(Schema):
    expert_count: Experts
    expert_used_count: Experts
    expert_feed_forward_length: Width


def read_gguf(file: GgufFile) -> Fields:
    """The fields of a `config.json` that a GGUF file's metadata says."""
    keys = gguf.read_keys(_Keys, file)
    return {
        **gguf.read_fields(file),
        "num_experts": keys.expert_count,
        "num_experts_per_tok": keys.expert_used_count,
        "moe_intermediate_size": keys.expert_feed_forward_length,
        # The format has no key for it: every Qwen3-MoE that was converted normalises.
        "norm_topk_prob": True,
    }


_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}

FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    read=read,
    write=write,
    params=params,
    tensors=tensors,
    gguf=Gguf("qwen3moe", read_gguf, gguf.NAMES, gguf.LAYER_NAMES | _EXPERTS, tensors),
)
