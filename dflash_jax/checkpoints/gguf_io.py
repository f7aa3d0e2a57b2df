"""GGUF files: metadata and dequantised tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf

from dflash_jax.checkpoints.aliases import target_tensors
from dflash_jax.checkpoints.gguf_config import config_fields
from dflash_jax.checkpoints.hf_config import target_config
from dflash_jax.checkpoints.tensors import HostArray, StoredTensor
from dflash_jax.errors import CheckpointError
from dflash_jax.models.config import TargetConfig

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Stacks of all experts, which lose their ".weight" as transformers' fused ones do.
_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r".*\.self_attn\.([qk])_proj\.(weight|bias)")


def open_gguf(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """A file's metadata by key, and its tensors by GGUF name, dequantised when read.

    Raises:
      CheckpointError: not a GGUF file, or a broken one.
    """
    try:
        reader = gguf.GGUFReader(file)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {file}") from None
    except Exception as error:  # the reader raises whatever parsing garbage leads to
        raise CheckpointError(f"{file} cannot be read as GGUF ({error}); it may be incomplete") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return metadata, {tensor.name: _stored(tensor, file) for tensor in reader.tensors}


def _stored(tensor: gguf.ReaderTensor, file: Path) -> StoredTensor:
    kind = tensor.tensor_type.name

    def load(slices: tuple[slice, ...]) -> HostArray:
        if kind not in SUPPORTED:
            raise CheckpointError(
                f"tensor {tensor.name!r} in {file} is quantised as {kind}, but it must be one of {', '.join(SUPPORTED)}"
            )
        # Quantisation runs along the last axis, so leading ones can be cut before it is undone.
        return gguf.quants.dequantize(tensor.data[slices], tensor.tensor_type)

    shape = tuple(int(size) for size in reversed(tensor.shape))
    return StoredTensor(tensor.name, file, shape, kind, load)


def gguf_target_config(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], file: Path) -> TargetConfig:
    """The target in a GGUF file. Raises CheckpointError or ConfigError if it is not one we can run."""
    return target_config(config_fields(metadata, tensors, file), source=str(file))


def gguf_target_tensors(tensors: Mapping[str, StoredTensor], config: TargetConfig) -> dict[str, StoredTensor]:
    """Tensors by Hugging Face name, with heads in Hugging Face's layout."""
    named = {_hf_name(name): tensor for name, tensor in tensors.items() if name != "rope_freqs.weight"}
    if config.family == "llama":
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        for name, tensor in named.items():
            if match := _ROTATED.fullmatch(name):
                named[name] = _half_split(tensor, heads[match[1]])
    return target_tensors(named)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    if match := _LAYER.fullmatch(name):
        index, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}"
        if part in _EXPERT_NAMES and kind == "weight":
            return f"model.layers.{index}.{_EXPERT_NAMES[part]}"
    return name


def _half_split(tensor: StoredTensor, heads: int) -> StoredTensor:
    """A rotated projection of a Llama file with its rows in Hugging Face's order.

    GGUF keeps the two rows of a rotary pair next to each other, Hugging Face half a head apart
    (`LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py is what this undoes).
    """

    def load(slices: tuple[slice, ...], read: Callable[[], HostArray] = tensor.read) -> HostArray:
        pairs = read().reshape(heads, -1, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)[slices]

    return StoredTensor(tensor.name, tensor.file, tensor.shape, tensor.dtype, load)
