"""Llama: no norms of queries and keys, optional biases everywhere."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
from jaxtyping import Float

from dflash_jax.errors import CheckpointError
from dflash_jax.families import fields as shared
from dflash_jax.families import gguf, parts
from dflash_jax.families.family import Family, Fields, Gguf, GgufFile
from dflash_jax.families.leaf import StoredTensor, Tensors, with_rows
from dflash_jax.families.rope import write_rope
from dflash_jax.models.config import LayerConfig, RopeConfig, TargetConfig
from dflash_jax.models.layers import inverse_wavelengths
from dflash_jax.models.weights import TargetParams
from dflash_jax.schema import Positions, TokenIds, check


class LlamaFields(shared.TargetFields):
    """Defaults are those of transformers' `LlamaConfig`."""

    max_position_embeddings: Positions = 2048
    bos_token_id: int | None = 1
    eos_token_id: TokenIds = (2,)
    mlp_bias: bool | None = False


def read(fields: Fields, source: str) -> TargetConfig:
    """The config that a `config.json` describes."""
    found = check(LlamaFields, fields, source)
    layers = (LayerConfig(),) * found.num_hidden_layers
    mlp_bias = bool(found.mlp_bias)
    return found.target(fields, source, family="llama", layers=layers, qk_norm=False, mlp_bias=mlp_bias)


def write(config: TargetConfig) -> dict[str, Any]:
    """The fields that `read` reads."""
    return {**shared.write_target(config), "mlp_bias": config.mlp_bias}


def params(config: TargetConfig) -> TargetParams:
    """Where each tensor belongs."""

    def layer(index: int):
        name = f"model.layers.{index}"
        return parts.decoder_layer(config, name, parts.dense_mlp(config, f"{name}.mlp", config.mlp_bias))

    return parts.target_params(config, layer)


# What every Llama 3.1, 3.2 and 3.3 was stretched with; a GGUF file keeps only the resulting factors.
_LLAMA3 = RopeConfig(kind="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
_FACTORS = "rope_freqs.weight"
_ROTATED = re.compile(r".*\.self_attn\.([qk]_proj)\.(weight|bias)")


def read_gguf(file: GgufFile) -> Fields:
    """The fields of a `config.json` that a GGUF file's metadata says."""
    fields = gguf.read_fields(file)
    extra: dict[str, Any] = {"mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    if _FACTORS in file.tensors:
        factors = file.tensors[_FACTORS].read().astype(np.float64)
        theta, head_dim = fields["rope_parameters"]["rope_theta"], fields["head_dim"]
        extra["rope_parameters"] = _llama3_rope(factors, theta, head_dim, str(file.file))
    return {**fields, **extra}


def _llama3_rope(factors: Float[np.ndarray, " pairs"], theta: float, head_dim: int, source: str) -> dict[str, Any]:
    """Llama 3.1's settings, recovered from the factor of each wavelength and checked against them."""
    plain, stretched = inverse_wavelengths(RopeConfig(theta=theta), head_dim), None
    if factors.shape == plain.shape and np.all(factors > 0):
        stretched = dataclasses.replace(_LLAMA3, theta=theta, factor=float(factors.max()))
    if stretched is None or not np.allclose(plain / inverse_wavelengths(stretched, head_dim), factors, rtol=1e-3):
        raise CheckpointError(
            f"the RoPE factors in {_FACTORS} of {source} are not those of Llama 3.1 (low 1, high 4, "
            "original context 8192), the only ones that can be read from GGUF; "
            "use the model's Hugging Face directory instead"
        )
    return write_rope(stretched)


def from_gguf(config: TargetConfig, tensors: Tensors) -> dict[str, StoredTensor]:
    """Tensors with the rows of rotated projections in Hugging Face's order, and without the RoPE factors."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    named = {name: tensor for name, tensor in tensors.items() if name != _FACTORS}
    for name, tensor in named.items():
        if match := _ROTATED.fullmatch(name):
            named[name] = _half_split(tensor, heads[match[1]])
    return named


def _half_split(tensor: StoredTensor, heads: int) -> StoredTensor:
    """A rotated projection with the halves of its rotary pairs half a head apart.

    GGUF keeps the two rows of a rotary pair next to each other (`LlamaModel.permute` in llama.cpp's
    convert_hf_to_gguf.py is what this undoes).
    """

    return with_rows(tensor, np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    read=read,
    write=write,
    params=params,
    gguf=Gguf("llama", read_gguf, gguf.NAMES, gguf.LAYER_NAMES, from_gguf),
)
