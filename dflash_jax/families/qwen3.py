"""Qwen3, dense: norms of queries and keys, optional sliding windows by layer."""

from __future__ import annotations

from typing import Any

from dflash_jax.families import fields as shared
from dflash_jax.families import gguf, parts
from dflash_jax.families.family import Family, Fields, Gguf
from dflash_jax.models.config import LayerConfig, TargetConfig
from dflash_jax.models.weights import TargetParams
from dflash_jax.schema import Heads, Positions, check


class Qwen3Fields(shared.TargetFields, shared.WindowFields):
    """Defaults are those of transformers' `Qwen3Config`."""

    num_key_value_heads: Heads | None = 32
    head_dim: Heads | None = 128
    max_position_embeddings: Positions = 32768


def read(fields: Fields, source: str) -> TargetConfig:
    """The config that a `config.json` describes."""
    found = check(Qwen3Fields, fields, source)
    window = found.sliding_window if found.use_sliding_window else None
    kinds = found.kinds(found.num_hidden_layers, source)
    layers = tuple(LayerConfig(window=shared.layer_window(kind, window, source)) for kind in kinds)
    return found.target(fields, source, family="qwen3", layers=layers, qk_norm=True)


def write(config: TargetConfig) -> dict[str, Any]:
    """The fields that `read` reads."""
    return {**shared.write_target(config), **shared.write_windows(config.layers)}


def params(config: TargetConfig) -> TargetParams:
    """Where each tensor belongs."""

    def layer(index: int):
        name = f"model.layers.{index}"
        return parts.decoder_layer(config, name, parts.dense_mlp(config, f"{name}.mlp"))

    return parts.target_params(config, layer)


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    read=read,
    write=write,
    params=params,
    gguf=Gguf("qwen3", gguf.read_fields, gguf.NAMES, gguf.LAYER_NAMES),
)
