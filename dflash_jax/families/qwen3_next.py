"""Qwen3-Next and Qwen3-Coder-Next: Gated DeltaNet with its projections packed together, and experts."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from jaxtyping import Int
from pydantic import Field

from dflash_jax.errors import CheckpointError, quote
from dflash_jax.families import gguf, hybrid, parts
from dflash_jax.families.family import Family, Fields, Gguf, GgufFile
from dflash_jax.families.leaf import StoredTensor, Tensors, changed, with_rows
from dflash_jax.models.config import GatedDeltaConfig, MoeConfig, TargetConfig
from dflash_jax.schema import Heads, LayerIndex, Layers, Width, check


class Qwen3NextFields(hybrid.HybridFields, hybrid.MoeFields):
    """Defaults are those of transformers' `Qwen3NextConfig`."""

    num_key_value_heads: Heads | None = 2
    intermediate_size: Width = 5632
    num_experts_per_tok: hybrid.Experts = 10
    num_experts: hybrid.Experts = 512
    norm_topk_prob: bool | None = True
    decoder_sparse_step: Layers = 1
    mlp_only_layers: Annotated[list[LayerIndex], Field(fail_fast=True)] | None = None


def read(fields: Fields, source: str) -> TargetConfig:
    """The config that a `config.json` describes."""
    found = check(Qwen3NextFields, fields, source)
    moe, dense = found.moe(source, normalize=bool(found.norm_topk_prob)), found.mlp_only_layers or ()

    def sparse(index: int) -> MoeConfig | None:
        return moe if index not in dense and (index + 1) % found.decoder_sparse_step == 0 else None

    return found.hybrid(fields, source, family="qwen3_next", moe=sparse)


def write(config: TargetConfig) -> dict[str, Any]:
    """The fields that `read` reads."""
    experts = hybrid.write_moe(config)
    return {
        **hybrid.write(config, "qwen3_next"),
        **experts,
        "norm_topk_prob": next(layer.moe.normalize_top_k for layer in config.layers if layer.moe is not None),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, layer in enumerate(config.layers) if layer.moe is None],
    }


# What is packed together, and the parts it is made of, in their order after it is taken apart.
_PACKED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}


def _orders(delta: GatedDeltaConfig) -> dict[str, tuple[Int[np.ndarray, " rows"], ...]]:
    """The rows of each part of what is packed together: key head by key head, all that belongs to it."""
    group = delta.num_value_heads // delta.num_key_heads
    key, values = delta.key_dim, group * delta.value_dim
    qkvz = np.arange(delta.num_key_heads * 2 * (key + values)).reshape(delta.num_key_heads, -1)
    ba = np.arange(2 * delta.num_value_heads).reshape(delta.num_key_heads, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(qkvz, [key, 2 * key, 2 * key + values], axis=1))
    b, a = (part.reshape(-1) for part in np.split(ba, 2, axis=1))
    return {"in_proj_qkvz": (np.concatenate([q, k, v]), z), "in_proj_ba": (b, a)}


def unpacked(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """Tensors with a projection for each part. Raises CheckpointError for a packed one of another shape."""
    found = dict(named)
    for index in config.gated_delta_layers:
        delta, name = config.layers[index].gated_delta, f"model.layers.{index}.linear_attn"
        assert delta is not None
        for whole, orders in _orders(delta).items():
            tensor = found.pop(f"{name}.{whole}.weight", None)
            if tensor is None:
                continue
            shape = (sum(map(len, orders)), config.hidden_size)
            if tensor.shape != shape:
                raise CheckpointError(
                    f"tensor {quote(tensor.name)} in {tensor.file} has shape {list(tensor.shape)}, "
                    f"but the model's config makes it {list(shape)}"
                )
            for part, order in zip(_PACKED[whole], orders, strict=True):
                found[f"{name}.{part}.weight"] = with_rows(tensor, order)
    return found


def tensors(config: TargetConfig, stored: Tensors) -> dict[str, StoredTensor]:
    """The tensors, with a projection for each part and a tensor per expert."""
    return unpacked(config, hybrid.tensors(config, stored))


def packed(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """The inverse of `tensors`."""
    found = hybrid.packed(config, named)
    for index in config.gated_delta_layers:
        delta, name = config.layers[index].gated_delta, f"model.layers.{index}.linear_attn"
        assert delta is not None
        for whole, orders in _orders(delta).items():
            pieces = [found.pop(f"{name}.{part}.weight") for part in _PACKED[whole]]
            found[f"{name}.{whole}.weight"] = _packed(pieces, np.argsort(np.concatenate(orders)))
    return found


def _packed(pieces: list[StoredTensor], order: Int[np.ndarray, " rows"]) -> StoredTensor:
    return changed(
        pieces[0],
        lambda first: np.concatenate([first, *(piece.read() for piece in pieces[1:])])[order],
        (len(order), *pieces[0].shape[1:]),
    )


def read_gguf(file: GgufFile) -> Fields:
    """The fields of a `config.json` that a GGUF file's metadata says."""
    return {**hybrid.read_gguf(file), **hybrid.read_gguf_moe(file)}


def from_gguf(config: TargetConfig, named: Tensors) -> dict[str, StoredTensor]:
    """Tensors as a Hugging Face checkpoint has them, taken apart. Older files have q, k, v and z packed together."""
    return parts.split_experts(unpacked(config, hybrid.from_gguf(config, named)))


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    read=read,
    write=write,
    params=hybrid.params,
    tensors=tensors,
    packed=packed,
    gguf=Gguf("qwen3next", read_gguf, gguf.NAMES, hybrid.GGUF_NAMES, from_gguf),
)
