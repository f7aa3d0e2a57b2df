"""The parts that families share, as params whose arrays are leaves: what each is called in a checkpoint, and its shape.

Names are transformers'. A family builds its table from these and adds what it alone has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.families.leaf import StoredTensor, Tensors, leaf
from dflash_jax.models.config import MoeConfig, TargetConfig, TransformerConfig
from dflash_jax.models.weights import AttentionWeights, LayerWeights, Linear, MlpWeights, MoeWeights, TargetParams


def target_params(config: TargetConfig, layer: Callable[[int], LayerWeights]) -> TargetParams:
    """A target: embedding, layers, final norm and, unless tied, the LM head.

    Args:
      config: the target.
      layer: makes the layer of a number.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    return TargetParams(
        embedding=leaf("model.embed_tokens.weight", vocab, hidden),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=leaf("model.norm.weight", hidden),
        lm_head=None if config.tied_embeddings else leaf("lm_head.weight", vocab, hidden, transposed=True),
    )


def decoder_layer(config: TransformerConfig, name: str, mlp: MlpWeights | MoeWeights, **more: Any) -> LayerWeights:
    """A layer of attention and an MLP, each with its norm.

    Args:
      config: sizes.
      name: what its tensors' names begin with.
      mlp: as `dense_mlp` or `sparse_mlp` make it.
      more: other fields of the weights.
    """
    return LayerWeights(
        input_norm=leaf(f"{name}.input_layernorm.weight", config.hidden_size),
        attention=attention(config, f"{name}.self_attn"),
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
        q_proj=linear(f"{name}.q_proj", hidden, heads, bias),
        k_proj=linear(f"{name}.k_proj", hidden, kv_heads, bias),
        v_proj=linear(f"{name}.v_proj", hidden, kv_heads, bias),
        o_proj=linear(f"{name}.o_proj", heads, hidden, bias),
        q_norm=leaf(f"{name}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=leaf(f"{name}.k_norm.weight", config.head_dim) if config.qk_norm else None,
    )


def dense_mlp(config: TransformerConfig, name: str, bias: bool = False) -> MlpWeights:
    """SwiGLU."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return MlpWeights(
        gate_proj=linear(f"{name}.gate_proj", hidden, inner, bias),
        up_proj=linear(f"{name}.up_proj", hidden, inner, bias),
        down_proj=linear(f"{name}.down_proj", inner, hidden, bias),
    )


def sparse_mlp(moe: MoeConfig, hidden: int, name: str) -> MoeWeights:
    """A router and its experts, whose tensors are separate in the checkpoint (see `split_experts` for stacked ones)."""
    inner, experts = moe.intermediate_size, moe.num_experts

    def stacked(part: str, *shape: int) -> Any:
        return leaf(f"{name}.experts.{{expert}}.{part}.weight", *shape, transposed=True, experts=experts)

    return MoeWeights(
        router=leaf(f"{name}.gate.weight", experts, hidden, transposed=True),
        gate_proj=stacked("gate_proj", inner, hidden),
        up_proj=stacked("up_proj", inner, hidden),
        down_proj=stacked("down_proj", hidden, inner),
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
