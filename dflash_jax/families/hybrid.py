"""What families of hybrids share: Gated DeltaNet layers among attention layers with a gate, and zero-centred norms."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int
from pydantic import Field

from dflash_jax.errors import CheckpointError, ConfigError, quote
from dflash_jax.families import fields as shared
from dflash_jax.families import gguf, parts
from dflash_jax.families.family import Fields, GgufFile
from dflash_jax.families.leaf import HostArray, StoredTensor, Tensors, changed, leave_out, with_rows
from dflash_jax.families.rope import read_rope
from dflash_jax.models.config import GatedDeltaConfig, LayerConfig, MoeConfig, RopeConfig, TargetConfig
from dflash_jax.models.weights import GatedDeltaWeights, TargetParams
from dflash_jax.schema import Heads, Layers, Names, Positions, Schema, Width

_PARTIAL = 0.25
_KINDS = ("linear_attention", "full_attention")
_LEFT_OUT = {
    "model.visual.": "the vision tower",
    "mtp.": "the head that predicts several tokens",
    "model.mtp.": "the head that predicts several tokens",
}

ConvWidth = Annotated[int, Field(ge=2, le=64)]
"""Inputs that a convolution sees."""
Experts = Annotated[int, Field(ge=1, le=4096)]
"""Experts of a layer."""


class HybridFields(shared.TargetFields):
    """Defaults are those of transformers' config classes of these families, which have the same."""

    head_dim: Heads | None = 256
    max_position_embeddings: Positions = 32768
    linear_conv_kernel_dim: ConvWidth = 4
    linear_key_head_dim: Heads = 128
    linear_value_head_dim: Heads = 128
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32
    layer_types: Names | None = None
    full_attention_interval: Layers = 4
    attn_output_gate: bool | None = True
    output_gate_type: str | None = None

    def rope(self, fields: Fields, source: str) -> RopeConfig:
        """The RoPE in `config.json`. That of several dimensions is the ordinary one where there is only text."""
        return read_rope(fields, self.max_position_embeddings, source, partial=_PARTIAL)

    def deltas(self, source: str) -> tuple[GatedDeltaConfig | None, ...]:
        """The Gated DeltaNet of each layer, None where there is attention."""
        depth, kinds = self.num_hidden_layers, self.layer_types
        if kinds is None:
            kinds = [_KINDS[(index + 1) % self.full_attention_interval == 0] for index in range(depth)]
        if len(kinds) != depth:
            raise ConfigError(
                f"layer_types in {source} has {len(kinds)} entries for {depth} layers; it must have one each"
            )
        strange = next((kind for kind in kinds if kind not in _KINDS), None)
        if strange is not None:
            raise ConfigError(
                f"layer type {quote(strange)} in {source} is not supported; it must be 'linear_attention' or "
                "'full_attention'"
            )
        delta = GatedDeltaConfig(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
        )
        return tuple(delta if kind == "linear_attention" else None for kind in kinds)

    def hybrid(
        self, fields: Fields, source: str, *, family: str, moe: Callable[[int], MoeConfig | None]
    ) -> TargetConfig:
        """The target.

        Args:
          fields, source: as of `sizes`.
          family: its name.
          moe: the mixture of experts of the layer of a number.

        Raises:
          ConfigError: layers or options that are not supported, or sizes that contradict each other.
        """
        if self.attn_output_gate is False:
            raise ConfigError(f"attn_output_gate in {source} is false; it must be true or absent")
        if self.output_gate_type not in (None, "silu", "swish"):
            raise ConfigError(
                f"output_gate_type {quote(self.output_gate_type)} in {source} is not supported; it must be 'swish' or "
                "absent"
            )
        layers = (LayerConfig(moe=moe(index), gated_delta=delta) for index, delta in enumerate(self.deltas(source)))
        return self.target(
            fields,
            source,
            family=family,
            layers=tuple(layers),
            qk_norm=True,
            attention_gate=True,
            zero_centred_norms=True,
        )


class MoeFields(Schema):
    """The experts of a layer."""

    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 512
    num_experts_per_tok: Experts
    num_experts: Experts

    def moe(self, source: str, *, normalize: bool = True) -> MoeConfig:
        """The mixture of experts of a layer that has one."""
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok in {source} is {self.num_experts_per_tok}, but it must be from 1 to the "
                f"number of experts, {self.num_experts}"
            )
        return MoeConfig(
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            normalize_top_k=normalize,
            shared_intermediate_size=self.shared_expert_intermediate_size,
        )


def write(config: TargetConfig, model_type: str) -> dict[str, Any]:
    """The fields of `HybridFields`. Raises ConfigError for a target without Gated DeltaNet layers."""
    fields = shared.write_target(config)
    delta = next((layer.gated_delta for layer in config.layers if layer.gated_delta is not None), None)
    if delta is None:
        raise ConfigError(f"a {config.family} config.json needs at least one Gated DeltaNet layer")
    # transformers would take its own default for a factor that is absent.
    fields["rope_parameters"]["partial_rotary_factor"] = config.rope.partial
    return {
        **fields,
        "model_type": model_type,
        "layer_types": [_KINDS[layer.gated_delta is None] for layer in config.layers],
        "linear_conv_kernel_dim": delta.conv_width,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
    }


def write_moe(config: TargetConfig) -> dict[str, Any]:
    """The fields of `MoeFields`. Raises ConfigError for layers whose experts differ."""
    kinds = {layer.moe for layer in config.layers if layer.moe is not None}
    if len(kinds) != 1:
        raise ConfigError(f"a {config.family} config.json needs the same experts in every layer that has some")
    moe = kinds.pop()
    return {
        "moe_intermediate_size": moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
        "num_experts_per_tok": moe.experts_per_token,
        "num_experts": moe.num_experts,
    }


def params(config: TargetConfig) -> TargetParams:
    """Where each tensor belongs."""

    def layer(index: int):
        name, kind = f"model.layers.{index}", config.layers[index]
        delta: GatedDeltaWeights | None = None
        if kind.gated_delta is not None:
            delta = parts.gated_delta(kind.gated_delta, config.hidden_size, f"{name}.linear_attn")
        sparse = None if kind.moe is None else parts.sparse_mlp(kind.moe, config.hidden_size, f"{name}.mlp")
        mlp = sparse or parts.dense_mlp(config, f"{name}.mlp")
        return parts.decoder_layer(config, name, mlp, gated_delta=delta)

    return parts.target_params(config, layer)


def tensors(config: TargetConfig, stored: Tensors) -> dict[str, StoredTensor]:
    """The text model's tensors, with the convolution's weights as matrices and a tensor per expert."""
    text = leave_out(stored, _LEFT_OUT)
    named = {name.replace("model.language_model.", "model.", 1): tensor for name, tensor in text.items()}
    for name, tensor in named.items():
        # torch's Conv1d has an axis of input channels, of which a depthwise one has 1.
        if name.endswith(".conv1d.weight") and len(tensor.shape) == 3 and tensor.shape[1] == 1:
            named[name] = changed(tensor, lambda array: array[:, 0], tensor.shape[::2])
    return parts.split_experts(named)


def packed(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """The inverse of `tensors`, with the experts stacked."""
    whole = dict(named)
    for name, tensor in named.items():
        if name.endswith(".conv1d.weight"):
            whole[name] = changed(tensor, lambda array: array[:, None], (tensor.shape[0], 1, tensor.shape[1]))
    return parts.stack_experts(whole)


class HybridKeys(gguf.TransformerKeys):
    """Keys of a hybrid; a file may say of each layer whether it is recurrent, or in which interval others come."""

    # Files of models without dense MLPs do not have it.
    feed_forward_length: Width | None = None  # type: ignore[assignment]
    nextn_predict_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    full_attention_interval: Layers = 4
    conv_kernel: ConvWidth = Field(alias="ssm.conv_kernel")
    inner_size: Width = Field(alias="ssm.inner_size")
    state_size: Heads = Field(alias="ssm.state_size")
    time_step_rank: Heads = Field(alias="ssm.time_step_rank")
    group_count: Heads = Field(alias="ssm.group_count")


class MoeKeys(Schema):
    """Keys of the experts."""

    expert_count: Experts
    expert_used_count: Experts
    expert_feed_forward_length: Width
    expert_shared_feed_forward_length: Width


def read_gguf(file: GgufFile) -> dict[str, Any]:
    """The fields of a `config.json` that a GGUF file's metadata says."""
    fields, keys = gguf.read_fields(file, HybridKeys, partial=True), gguf.read_keys(HybridKeys, file)
    depth = keys.block_count - keys.nextn_predict_layers
    if depth < 1 or keys.inner_size % keys.time_step_rank:
        raise CheckpointError(
            f"{file.file} has {keys.block_count} blocks, {keys.nextn_predict_layers} of them to predict several "
            f"tokens, and {keys.inner_size} values for {keys.time_step_rank} heads; some block must be of the model, "
            "and every head must have as many values"
        )
    if keys.feed_forward_length is None:
        del fields["intermediate_size"]
    return {
        **fields,
        "num_hidden_layers": depth,
        "layer_types": _layer_types(file, depth, keys.full_attention_interval),
        "linear_conv_kernel_dim": keys.conv_kernel,
        "linear_key_head_dim": keys.state_size,
        "linear_value_head_dim": keys.inner_size // keys.time_step_rank,
        "linear_num_key_heads": keys.group_count,
        "linear_num_value_heads": keys.time_step_rank,
    }


def _layer_types(file: GgufFile, depth: int, interval: int) -> list[str]:
    name = f"{file.metadata['general.architecture']}.attention.recurrent_layers"
    recurrent = file.metadata.get(name)
    if recurrent is None:
        recurrent = [(index + 1) % interval != 0 for index in range(depth)]
    if not isinstance(recurrent, list) or len(recurrent) < depth or not all(one in (0, 1) for one in recurrent):
        raise CheckpointError(
            f"{name} in the metadata of {file.file} is {quote(recurrent)}, but it must be a list that says of each of "
            f"{depth} layers whether it is recurrent"
        )
    return [_KINDS[not one] for one in recurrent[:depth]]


def read_gguf_moe(file: GgufFile) -> dict[str, Any]:
    """The fields of `MoeFields`."""
    keys = gguf.read_keys(MoeKeys, file)
    return {
        "num_experts": keys.expert_count,
        "num_experts_per_tok": keys.expert_used_count,
        "moe_intermediate_size": keys.expert_feed_forward_length,
        "shared_expert_intermediate_size": keys.expert_shared_feed_forward_length,
    }


GGUF_NAMES = gguf.LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_proj",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
del GGUF_NAMES["ffn_norm"]

_OF_NEXT = re.compile(r"blk\.(\d+)\.nextn\..*")


def from_gguf(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """Tensors as a Hugging Face checkpoint has them, of which conversion changes some (`conversion/qwen.py` there).

    Norms are stored with 1 added, but for that of a Gated DeltaNet's output; A_log as -exp(A_log).
    """
    found = {name.replace(".dt_proj.bias", ".dt_bias"): tensor for name, tensor in _of_layers(config, named).items()}
    for name, tensor in found.items():
        if name.endswith(".A_log"):
            found[name] = changed(tensor, partial(_a_log, tensor))
        elif name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
            found[name] = changed(tensor, lambda array: array - 1)
        elif name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1:
            found[name] = changed(tensor, lambda array: array[None], (1, *tensor.shape))
    return found


def _of_layers(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """The tensors without those of blocks behind the model's, which predict several tokens."""
    extra = {int(match[1]) for name in named if (match := _OF_NEXT.fullmatch(name))}
    prefixes = [f"{stem}.{index}." for index in extra - set(range(config.num_layers)) for stem in _BLOCKS]
    return leave_out(named, dict.fromkeys(prefixes, "the head that predicts several tokens"))


_BLOCKS = ("model.layers", "blk")


def _a_log(stored: StoredTensor, array: HostArray) -> HostArray:
    if np.any(array >= 0):
        raise CheckpointError(
            f"tensor {quote(stored.name)} in {stored.file} has {array[array >= 0][0]} among its values, but each is "
            "-exp(A_log) and must be below 0"
        )
    with np.errstate(all="ignore"):  # what is not finite is told as a weight that is not
        return np.log(-array)


def untiled(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """Tensors with value heads that share a key head next to each other.

    In `qwen35` and `qwen35moe` the first value head of every key head comes first, then the second of each.
    """
    found = dict(named)
    for index in config.gated_delta_layers:
        delta = config.layers[index].gated_delta
        assert delta is not None
        heads, values = _grouped(delta, 1), _grouped(delta, delta.value_dim)
        keys = np.arange(delta.channels - delta.values)
        channels = np.concatenate([keys, len(keys) + values])
        rows = dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), channels) | {"in_proj_z.weight": values}
        rows |= dict.fromkeys(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"), heads)
        name = f"model.layers.{index}.linear_attn"
        for part, order in rows.items():
            # A tensor of another shape is told later, with all that are.
            tensor = found.get(f"{name}.{part}")
            if tensor is not None and tensor.shape[0] == len(order):
                found[f"{name}.{part}"] = with_rows(tensor, order)
        out = found.get(f"{name}.out_proj.weight")
        if out is not None and out.shape[1:] == values.shape:
            found[f"{name}.out_proj.weight"] = _with_columns(out, values)
    return found


def _with_columns(tensor: StoredTensor, columns: Int[np.ndarray, " chosen"]) -> StoredTensor:
    return changed(tensor, lambda array: array[:, columns])


def _grouped(delta: GatedDeltaConfig, width: int) -> Int[np.ndarray, " rows"]:
    """Where the rows of value heads, `width` each, lie among those of heads in tiles."""
    rows = np.arange(delta.num_value_heads * width)
    return rows.reshape(-1, delta.num_key_heads, width).swapaxes(0, 1).reshape(-1)
