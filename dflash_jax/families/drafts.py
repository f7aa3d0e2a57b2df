"""DFlash and DFlash 2 drafts: `config.json` as the reference package `dflash` 0.1.0 has it, and tensors."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from dflash_jax.errors import ConfigError, quote
from dflash_jax.families import fields as shared
from dflash_jax.families import parts
from dflash_jax.families.family import Fields
from dflash_jax.families.leaf import StoredTensor, Tensors, leaf
from dflash_jax.models.config import ConvConfig, DraftConfig, LayerConfig, SelectorConfig, default_target_layer_ids
from dflash_jax.models.weights import ConvWeights, DraftParams, SelectorWeights
from dflash_jax.schema import Heads, LayerIndex, Positions, Scale, Schema, VocabSize, Width, check

ARCHITECTURES = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}
"""What `config.json` calls a draft, and the version of DFlash that it is."""


class _DraftFields(shared.TransformerFields, shared.WindowFields):
    """Defaults are those of transformers' `Qwen3Config`.

    The user's checkpoint decides on its window; unlike a target's, its `use_sliding_window` may be left out.
    """

    num_key_value_heads: Heads | None = 32
    head_dim: Heads | None = 128
    max_position_embeddings: Positions = 32768
    sliding_window: Positions | None = None
    num_target_layers: Annotated[int, Field(ge=0, le=1024)] | None = None


class _Options(Schema):
    """What may stand in `dflash_config` or at the top level."""

    block_size: Annotated[int, Field(ge=2, le=4096)] | None = None
    mask_token_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    target_layer_ids: Annotated[list[LayerIndex], Field(max_length=1024, fail_fast=True)] | None = None
    is_causal: bool | None = None
    input_embedding_scale: Scale | None = None
    output_multiplier: Scale | None = None
    final_logit_softcapping: Annotated[float, Field(ge=0.0, le=1e9)] | None = None


class _SecondOptions(_Options):
    """The same, of DFlash 2."""

    conv_kernel_size: Annotated[int, Field(ge=1, le=4096)]
    conv_group_size: Width
    selector_rank: Width
    selector_top_k: VocabSize


def read(fields: Fields, version: int, mask_token_id: int | None, source: str) -> DraftConfig:
    """The config that a `config.json` describes.

    Args:
      fields: its contents; options in `dflash_config` win over the top level.
      version: 1 for DFlash, 2 for DFlash 2.
      mask_token_id: the user's, in place of the config's.
      source: the file, for messages.
    """
    found = check(_DraftFields, fields, source)
    options = _read_options(fields, version, source)
    if mask_token_id is None:
        mask_token_id = options.mask_token_id
    if mask_token_id is None:
        raise ConfigError(
            f"mask_token_id is missing from {source}, so the user must give it as `draft.mask_token_id`: "
            "the token the draft was trained to find at the positions it drafts"
        )
    conv = selector = None
    if isinstance(options, _SecondOptions):
        conv = ConvConfig(options.conv_kernel_size, options.conv_group_size)
        selector = SelectorConfig(options.selector_rank, options.selector_top_k)
    return DraftConfig(
        **found.sizes(fields, source),
        layers=_read_layers(found, options.is_causal, source),
        qk_norm=True,
        block_size=16 if options.block_size is None else options.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=_target_layer_ids(found, options, source),
        num_target_layers=found.num_target_layers or 0,
        input_embedding_scale=1.0 if options.input_embedding_scale is None else options.input_embedding_scale,
        output_multiplier=1.0 if options.output_multiplier is None else options.output_multiplier,
        final_logit_softcap=options.final_logit_softcapping or None,
        conv=conv,
        selector=selector,
    )


def _read_options(fields: Fields, version: int, source: str) -> _Options:
    nested = fields.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ConfigError(f"dflash_config in {source} is {quote(nested)}, but it must be an object")

    def label(name: str) -> str:
        return f"dflash_config.{name}" if name in nested else name

    return check(_SecondOptions if version == 2 else _Options, {**fields, **nested}, source, label=label)


def _read_layers(found: _DraftFields, is_causal: bool | None, source: str) -> tuple[LayerConfig, ...]:
    window = None if found.use_sliding_window is False else found.sliding_window
    layers = []
    for kind in found.kinds(found.num_hidden_layers, source):
        causal = kind == "sliding_attention" if is_causal is None else is_causal
        layers.append(LayerConfig(window=shared.layer_window(kind, window, source), causal=causal))
    return tuple(layers)


def _target_layer_ids(found: _DraftFields, options: _Options, source: str) -> tuple[int, ...]:
    if options.target_layer_ids is not None:
        return tuple(options.target_layer_ids)
    if not found.num_target_layers:
        raise ConfigError(
            f"{source} has neither target_layer_ids nor num_target_layers, one of which must say "
            "which layers of the target the draft is conditioned on"
        )
    return default_target_layer_ids(found.num_target_layers, found.num_hidden_layers)


def write(config: DraftConfig) -> dict[str, Any]:
    """The fields that `read` reads. Raises ConfigError for layers that differ in ways these cannot say."""
    options: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
    }
    if config.final_logit_softcap is not None:
        options["final_logit_softcapping"] = config.final_logit_softcap
    if config.conv is not None and config.selector is not None:
        options |= {
            "conv_kernel_size": config.conv.taps,
            "conv_group_size": config.conv.group_size,
            "selector_rank": config.selector.rank,
            "selector_top_k": config.selector.top_k,
        }
    elif config.conv is not None or config.selector is not None:
        raise ConfigError("a draft has both the convolution and the selector (DFlash 2) or neither (DFlash)")
    return {
        "architectures": [next(name for name, version in ARCHITECTURES.items() if version == config.version)],
        "model_type": "qwen3",
        **shared.write_sizes(config),
        **shared.write_windows(config.layers),
        **_write_causal(config.layers),
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "dflash_config": options,
    }


def _write_causal(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    causal = {layer.causal for layer in layers}
    if len(causal) == 1:
        return {"is_causal": causal.pop()}
    # What a reader assumes where `is_causal` is left out.
    if all(layer.causal == (layer.window is not None) for layer in layers):
        return {}
    raise ConfigError(
        "the draft's layers are some causal and some not, otherwise than sliding ones causal and full ones not; "
        "config.json has one is_causal for all"
    )


def params(config: DraftConfig) -> DraftParams:
    """Where each tensor belongs."""
    hidden, selector = config.hidden_size, None
    if config.selector is not None:
        rank, name = config.selector.rank, "candidate_selector"
        selector = SelectorWeights(
            predecessor_codebook=leaf(f"{name}.predecessor_codebook", config.vocab_size, rank),
            successor_codebook=leaf(f"{name}.successor_codebook", config.vocab_size, rank),
            hidden_projection=leaf(f"{name}.hidden_projection.weight", rank, hidden, transposed=True),
        )

    def layer(index: int):
        name = f"layers.{index}"
        return parts.decoder_layer(
            config,
            name,
            parts.dense_mlp(config, f"{name}.mlp"),
            attention_conv=_conv(config.conv, hidden, f"{name}.attention_conv"),
            mlp_conv=_conv(config.conv, hidden, f"{name}.mlp_conv"),
        )

    return DraftParams(
        fc=leaf("fc.weight", hidden, len(config.target_layer_ids) * hidden, transposed=True),
        hidden_norm=leaf("hidden_norm.weight", hidden),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=leaf("norm.weight", hidden),
        selector=selector,
    )


def _conv(conv: ConvConfig | None, hidden: int, name: str) -> ConvWeights | None:
    if conv is None:
        return None
    deltas = 2 * conv.taps * (hidden // conv.group_size)
    return ConvWeights(
        base_kernel=leaf(f"{name}.base_kernel", 2, conv.taps, hidden),
        kernel_projection=leaf(f"{name}.kernel_projection.weight", deltas, hidden, transposed=True),
    )


_CODEBOOK = re.compile(r"(candidate_selector\.(?:predecessor|successor)_codebook)\.weight")


def tensors(stored: Tensors) -> dict[str, StoredTensor]:
    """Tensors under the names that `params` gives: no `model.` prefix, codebooks without `.weight`."""
    return {_CODEBOOK.sub(r"\1", name.removeprefix("model.")): tensor for name, tensor in stored.items()}
