"""The one table of a model's weights: where each stands in the params and what checkpoints call it.

Loading, saving, counting and Orbax all walk the same list, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jaxtyping import Array

from dflash_jax.models.config import DraftConfig, MoeConfig, TargetConfig, TransformerConfig
from dflash_jax.models.matrix import Matrix
from dflash_jax.models.weights import (
    AttentionWeights,
    ConvWeights,
    DraftParams,
    LayerWeights,
    Linear,
    MlpWeights,
    MoeWeights,
    SelectorWeights,
    TargetParams,
)

Config = TargetConfig | DraftConfig
Params = TargetParams | DraftParams


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the params.

    Attributes:
      path: where it stands in the params, attributes and layer numbers joined by dots.
      name: its Hugging Face tensor name; of stacked experts, with `{expert}` for the number.
      shape: shape of the tensor (of one expert's tensor) in the checkpoint.
      transposed: the params hold the transpose, as of every torch Linear ([out, in] there).
      experts: how many tensors are stacked on a leading axis; 0 for a plain tensor.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    experts: int = 0

    @property
    def is_matrix(self) -> bool:
        """Whether the params hold it as a `Matrix`: the weight of a Linear that activations are multiplied by."""
        return self.transposed and not self.experts

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor the array is made of."""
        if not self.experts:
            return (self.name,)
        return tuple(self.name.format(expert=expert) for expert in range(self.experts))

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Shape of the array in the params."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return (self.experts, *shape) if self.experts else shape

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.param_shape)


def table(config: Config) -> tuple[Leaf, ...]:
    """Every array of a model, in a fixed order."""
    return tuple(_draft_leaves(config) if isinstance(config, DraftConfig) else _target_leaves(config))


def _target_leaves(config: TargetConfig) -> Iterator[Leaf]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield Leaf("embedding", "model.embed_tokens.weight", (vocab, hidden))
    for index in range(config.num_layers):
        yield from _layer_leaves(config, index, f"model.layers.{index}", config.mlp_bias)
    yield Leaf("norm", "model.norm.weight", (hidden,))
    if not config.tied_embeddings:
        yield Leaf("lm_head", "lm_head.weight", (vocab, hidden), transposed=True)


def _draft_leaves(config: DraftConfig) -> Iterator[Leaf]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield Leaf("fc", "fc.weight", (hidden, len(config.target_layer_ids) * hidden), transposed=True)
    yield Leaf("hidden_norm", "hidden_norm.weight", (hidden,))
    for index in range(config.num_layers):
        yield from _layer_leaves(config, index, f"layers.{index}", False)
        if config.conv is not None:
            deltas = 2 * config.conv.taps * (hidden // config.conv.group_size)
            for conv in ("attention_conv", "mlp_conv"):
                path = f"layers.{index}.{conv}"
                yield Leaf(f"{path}.base_kernel", f"{path}.base_kernel", (2, config.conv.taps, hidden))
                name = f"{path}.kernel_projection.weight"
                yield Leaf(f"{path}.kernel_projection", name, (deltas, hidden), transposed=True)
    yield Leaf("norm", "norm.weight", (hidden,))
    if config.selector is not None:
        rank = config.selector.rank
        for book in ("predecessor_codebook", "successor_codebook"):
            yield Leaf(f"selector.{book}", f"candidate_selector.{book}", (vocab, rank))
        name = "candidate_selector.hidden_projection.weight"
        yield Leaf("selector.hidden_projection", name, (rank, hidden), transposed=True)


def _layer_leaves(config: TransformerConfig, index: int, name: str, mlp_bias: bool) -> Iterator[Leaf]:
    path, hidden = f"layers.{index}", config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield Leaf(f"{path}.input_norm", f"{name}.input_layernorm.weight", (hidden,))
    attention = f"{path}.attention", f"{name}.self_attn"
    yield from _linear_leaves(*attention, "q_proj", hidden, heads, config.attention_bias)
    yield from _linear_leaves(*attention, "k_proj", hidden, kv_heads, config.attention_bias)
    yield from _linear_leaves(*attention, "v_proj", hidden, kv_heads, config.attention_bias)
    yield from _linear_leaves(*attention, "o_proj", heads, hidden, config.attention_bias)
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield Leaf(f"{path}.attention.{norm}", f"{name}.self_attn.{norm}.weight", (config.head_dim,))
    yield Leaf(f"{path}.post_attention_norm", f"{name}.post_attention_layernorm.weight", (hidden,))
    moe = config.layers[index].moe
    if moe is not None:
        yield from _moe_leaves(f"{path}.mlp", f"{name}.mlp", hidden, moe)
        return
    mlp, inner = (f"{path}.mlp", f"{name}.mlp"), config.intermediate_size
    yield from _linear_leaves(*mlp, "gate_proj", hidden, inner, mlp_bias)
    yield from _linear_leaves(*mlp, "up_proj", hidden, inner, mlp_bias)
    yield from _linear_leaves(*mlp, "down_proj", inner, hidden, mlp_bias)


def _linear_leaves(path: str, name: str, part: str, inputs: int, outputs: int, bias: bool) -> Iterator[Leaf]:
    yield Leaf(f"{path}.{part}.weight", f"{name}.{part}.weight", (outputs, inputs), transposed=True)
    if bias:
        yield Leaf(f"{path}.{part}.bias", f"{name}.{part}.bias", (outputs,))


def _moe_leaves(path: str, name: str, hidden: int, moe: MoeConfig) -> Iterator[Leaf]:
    inner, experts = moe.intermediate_size, moe.num_experts
    yield Leaf(f"{path}.router", f"{name}.gate.weight", (experts, hidden), transposed=True)
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for part, shape in shapes.items():
        yield Leaf(f"{path}.{part}", f"{name}.experts.{{expert}}.{part}.weight", shape, True, experts)


def param_at(params: Params, path: str) -> Array:
    """The array at a leaf's path; of a matrix [inputs, outputs], however it lies."""
    node = params
    for step in path.split("."):
        node = node[int(step)] if step.isdigit() else getattr(node, step)  # type: ignore[index]
    return node.in_out if isinstance(node, Matrix) else node  # type: ignore[return-value]


def build_params(config: Config, arrays: Mapping[str, jax.Array]) -> Params:
    """Params from an array per path of the config's table."""
    return _build(config, {leaf.path: _held(leaf, arrays[leaf.path]) for leaf in table(config)})


def _held(leaf: Leaf, array: jax.Array) -> Any:
    return Matrix(array) if leaf.is_matrix else array


def _build(config: Config, arrays: Mapping[str, Any]) -> Params:
    layers = tuple(_layer(f"layers.{index}", arrays) for index in range(config.num_layers))
    if isinstance(config, TargetConfig):
        return TargetParams(
            embedding=arrays["embedding"], layers=layers, norm=arrays["norm"], lm_head=arrays.get("lm_head")
        )
    selector = None
    if config.selector is not None:
        selector = SelectorWeights(
            predecessor_codebook=arrays["selector.predecessor_codebook"],
            successor_codebook=arrays["selector.successor_codebook"],
            hidden_projection=arrays["selector.hidden_projection"],
        )
    return DraftParams(
        fc=arrays["fc"], hidden_norm=arrays["hidden_norm"], layers=layers, norm=arrays["norm"], selector=selector
    )


def _layer(path: str, arrays: Mapping[str, Any]) -> LayerWeights:
    def linear(part: str) -> Linear:
        return Linear(weight=arrays[f"{path}.{part}.weight"], bias=arrays.get(f"{path}.{part}.bias"))

    def conv(part: str) -> ConvWeights | None:
        if f"{path}.{part}.base_kernel" not in arrays:
            return None
        return ConvWeights(
            base_kernel=arrays[f"{path}.{part}.base_kernel"],
            kernel_projection=arrays[f"{path}.{part}.kernel_projection"],
        )

    mlp: MlpWeights | MoeWeights
    if f"{path}.mlp.router" in arrays:
        parts = ("router", "gate_proj", "up_proj", "down_proj")
        mlp = MoeWeights(**{part: arrays[f"{path}.mlp.{part}"] for part in parts})
    else:
        mlp = MlpWeights(
            gate_proj=linear("mlp.gate_proj"), up_proj=linear("mlp.up_proj"), down_proj=linear("mlp.down_proj")
        )
    attention = AttentionWeights(
        q_proj=linear("attention.q_proj"),
        k_proj=linear("attention.k_proj"),
        v_proj=linear("attention.v_proj"),
        o_proj=linear("attention.o_proj"),
        q_norm=arrays.get(f"{path}.attention.q_norm"),
        k_norm=arrays.get(f"{path}.attention.k_norm"),
    )
    return LayerWeights(
        input_norm=arrays[f"{path}.input_norm"],
        attention=attention,
        post_attention_norm=arrays[f"{path}.post_attention_norm"],
        mlp=mlp,
        attention_conv=conv("attention_conv"),
        mlp_conv=conv("mlp_conv"),
    )
