"""The parts that families share, as params whose arrays are leaves: what each is called in a checkpoint, and its shape.

Names are transformers'. A family builds its table from these and adds what it alone has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dflash_jax.families.leaf import HostArray, StoredTensor, Tensors, leaf
from dflash_jax.models.config import GatedDeltaConfig, MoeConfig, TargetConfig, TransformerConfig
from dflash_jax.models.weights import (
    AttentionWeights,
    GatedDeltaWeights,
    LayerWeights,
    Linear,
    MlpWeights,
    MoeWeights,
    SharedExpertWeights,
    TargetParams,
)


def target_params(config: TargetConfig, layer: Callable[[int], LayerWeights]) -> TargetParams:
    """A target: embedding, layers, final norm and, unless tied, the LM head.

    Args:
      config: the target.
      layer: makes the layer of a number.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    return TargetParams(
        embedding=leaf("model.embed_tokens.weight", vocab, hidden, looked_up=True),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=leaf("model.norm.weight", hidden),
        lm_head=None if config.tied_embeddings else leaf("lm_head.weight", vocab, hidden, transposed=True),
    )


def decoder_layer(
    config: TransformerConfig,
    name: str,
    mlp: MlpWeights | MoeWeights,
    *,
    gated_delta: GatedDeltaWeights | None = None,
    **more: Any,
) -> LayerWeights:
    """A layer of attention and an MLP, each with its norm.

    Args:
      config: sizes.
      name: what its tensors' names begin with.
      mlp: as `dense_mlp` or `sparse_mlp` make it.
      gated_delta: what stands in the place of attention, if anything does.
      more: other fields of the weights.
    """
    return LayerWeights(
        input_norm=leaf(f"{name}.input_layernorm.weight", config.hidden_size),
        attention=gated_delta or attention(config, f"{name}.self_attn"),
        post_attention_norm=leaf(f"{name}.post_attention_layernorm.weight", config.hidden_size),
        mlp=mlp,
        **more,
    )


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
    """A torch Linear: its weight is [outputs, inputs]."""
    weight = leaf(f"{name}.weight", outputs, inputs, transposed=True)
    return Linear(weight=weight, bias=leaf(f"{name}.bias", outputs) if bias else None)


def attention(config: TransformerConfig, name: str) -> AttentionWeights:
    """Grouped-query attention, with norms of queries and keys per head if the config has them."""
    hidden, bias = config.hidden_size, config.attention_bias
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return AttentionWeights(
        q_proj=linear(f"{name}.q_proj", hidden, 2 * heads if config.attention_gate else heads, bias),
        k_proj=linear(f"{name}.k_proj", hidden, kv_heads, bias),
        v_proj=linear(f"{name}.v_proj", hidden, kv_heads, bias),
        o_proj=linear(f"{name}.o_proj", heads, hidden, bias),
        q_norm=leaf(f"{name}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=leaf(f"{name}.k_norm.weight", config.head_dim) if config.qk_norm else None,
    )


def gated_delta(delta: GatedDeltaConfig, hidden: int, name: str) -> GatedDeltaWeights:
    """Gated DeltaNet, with a projection for each of what Qwen3-Next packs together."""

    def matrix(part: str, inputs: int, outputs: int) -> Any:
        return leaf(f"{name}.{part}.weight", outputs, inputs, transposed=True)

    return GatedDeltaWeights(
        in_proj_qkv=matrix("in_proj_qkv", hidden, delta.channels),
        in_proj_z=matrix("in_proj_z", hidden, delta.values),
        in_proj_b=matrix("in_proj_b", hidden, delta.num_value_heads),
        in_proj_a=matrix("in_proj_a", hidden, delta.num_value_heads),
        conv=leaf(f"{name}.conv1d.weight", delta.channels, delta.conv_width),
        a_log=leaf(f"{name}.A_log", delta.num_value_heads),
        dt_bias=leaf(f"{name}.dt_bias", delta.num_value_heads),
        norm=leaf(f"{name}.norm.weight", delta.value_dim),
        out_proj=matrix("out_proj", delta.values, hidden),
    )


def dense_mlp(config: TransformerConfig, name: str, bias: bool = False) -> MlpWeights:
    """SwiGLU."""
    return _swiglu(config.hidden_size, config.intermediate_size, name, bias)


def _swiglu(hidden: int, inner: int, name: str, bias: bool = False) -> MlpWeights:
    return MlpWeights(
        gate_proj=linear(f"{name}.gate_proj", hidden, inner, bias),
        up_proj=linear(f"{name}.up_proj", hidden, inner, bias),
        down_proj=linear(f"{name}.down_proj", inner, hidden, bias),
    )


def sparse_mlp(moe: MoeConfig, hidden: int, name: str) -> MoeWeights:
    """A router and its experts, whose tensors are separate in the checkpoint (see `split_experts` for stacked ones)."""
    inner, experts, shared = moe.intermediate_size, moe.num_experts, None
    if moe.shared_intermediate_size is not None:
        shared = SharedExpertWeights(
            gate=leaf(f"{name}.shared_expert_gate.weight", 1, hidden, transposed=True),
            mlp=_swiglu(hidden, moe.shared_intermediate_size, f"{name}.shared_expert"),
        )

    def stacked(part: str, *shape: int) -> Any:
        return leaf(f"{name}.experts.{{expert}}.{part}.weight", *shape, transposed=True, experts=experts)

    return MoeWeights(
        router=leaf(f"{name}.gate.weight", experts, hidden, transposed=True),
        gate_proj=stacked("gate_proj", inner, hidden),
        up_proj=stacked("up_proj", inner, hidden),
        down_proj=stacked("down_proj", hidden, inner),
        shared=shared,
    )


_FUSED = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


def split_experts(tensors: Tensors) -> dict[str, StoredTensor]:
    """Tensors with stacks of experts taken apart.

    transformers 5 (`Qwen3MoeExperts`) holds `experts.gate_up_proj` [experts, 2 * inner, hidden], gate first,
    and `experts.down_proj` [experts, hidden, inner]; GGUF stacks each projection alone, as `experts.gate_proj.weight`.
    """
    separate: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        if prefix.endswith(".experts") and part in _FUSED and len(tensor.shape) == 3:
            separate.update(_split(prefix, part, tensor))
        else:
            separate[name] = tensor
    return separate


def _split(prefix: str, part: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    experts, rows, columns = tensor.shape
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    height = rows // len(names)
    for expert in range(experts):
        for index, name in enumerate(names):

            def load(slices: tuple[slice, ...], expert=expert, start=index * height):
                return tensor.read(slice(expert, expert + 1), slice(start, start + height))[0][slices]

            one = StoredTensor(tensor.name, tensor.file, (height, columns), tensor.dtype, load)
            yield f"{prefix}.{expert}.{name}.weight", one


def stack_experts(tensors: Tensors) -> dict[str, StoredTensor]:
    """The inverse of `split_experts`: stacks as transformers 5 holds them."""
    whole = {name: tensor for name, tensor in tensors.items() if _EXPERT.fullmatch(name) is None}
    parts: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            parts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for prefix, by_part in parts.items():
        stacks = {part: [one for _, one in sorted(of_expert.items())] for part, of_expert in by_part.items()}
        gates, ups = stacks.pop("gate_proj"), stacks.pop("up_proj")
        whole[f"{prefix}.gate_up_proj"] = _stacked(list(zip(gates, ups, strict=True)))
        whole[f"{prefix}.down_proj"] = _stacked([(down,) for down in stacks.pop("down_proj")])
    return whole


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def _stacked(experts: list[tuple[StoredTensor, ...]]) -> StoredTensor:
    """One tensor of all experts, each of which has its parts below each other."""
    first = experts[0][0]
    rows, columns = sum(part.shape[0] for part in experts[0]), first.shape[1]

    def load(slices: tuple[slice, ...]) -> HostArray:
        return np.stack([np.concatenate([part.read() for part in one]) for one in experts])[slices]

    return StoredTensor(first.name, first.file, (len(experts), rows, columns), first.dtype, load)
