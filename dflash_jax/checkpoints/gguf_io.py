"""GGUF files: metadata and dequantised tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dflash_jax.checkpoints.aliases import target_tensors
from dflash_jax.checkpoints.gguf_config import config_fields
from dflash_jax.checkpoints.gguf_header import TensorEntry
from dflash_jax.checkpoints.gguf_parts import read_parts
from dflash_jax.checkpoints.hf_config import target_config
from dflash_jax.checkpoints.tensors import HostArray, StoredTensor
from dflash_jax.errors import CheckpointError, quote
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
    """A model's metadata by key, and its tensors by GGUF name, dequantised when read.

    Args:
      file: the only file, or any part of a model that is split into several.

    Raises:
      CheckpointError: not a GGUF file, a damaged one, or parts that do not make a whole.
    """
    headers = read_parts(file)
    tensors = {
        entry.name: _stored(entry, part, np.memmap(part, mode="r"))
        for part, header in headers.items()
        for entry in header.tensors
    }
    return next(iter(headers.values())).metadata, tensors


def _stored(entry: TensorEntry, file: Path, data: np.memmap) -> StoredTensor:
    kind = entry.kind.name

    def load(slices: tuple[slice, ...]) -> HostArray:
        if kind not in SUPPORTED:
            raise CheckpointError(
                f"tensor {quote(entry.name)} in {file} is quantised as {kind}, "
                f"but it must be one of {', '.join(SUPPORTED)}"
            )
        # Quantisation runs along the last axis, so leading ones can be cut before it is undone.
        part = np.asarray(data[entry.start : entry.end]).reshape(entry.stored_shape)[slices]
        with np.errstate(all="ignore"):  # a scale that is not finite is told as a weight that is not
            return gguf.quants.dequantize(part, entry.kind)

    return StoredTensor(entry.name, file, entry.shape, kind, load)


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
