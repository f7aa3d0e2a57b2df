"""`config.json` to model configs. Field names and defaults are transformers' and dflash 0.1.0's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.rope import read_rope
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import (
    ConvConfig,
    DraftConfig,
    LayerConfig,
    MoeConfig,
    SelectorConfig,
    TargetConfig,
    default_target_layer_ids,
)

Fields = Mapping[str, Any]
Family = Literal["qwen3", "llama", "qwen3_moe"]

FAMILIES: dict[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
DRAFTS = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}

_QWEN3 = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# Where a config.json leaves a field out, it means its class's default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
}


def read_fields(file: Path) -> dict[str, Any]:
    """A JSON file's object. Raises CheckpointError if there is none."""
    return read_object(file)


def architecture(fields: Fields, source: str) -> str:
    """The model's architecture, one this package knows. Raises ConfigError for any other."""
    known = [*FAMILIES, *DRAFTS]
    named = fields.get("architectures") or []
    for name in named:
        if name in known:
            return name
    found = f"architecture {', '.join(map(repr, named))}" if named else "no 'architectures'"
    raise ConfigError(f"{source} has {found}, but it must name one of {', '.join(known)}")


def target_config(fields: Fields, generation: Fields | None = None, source: str = "config.json") -> TargetConfig:
    """A target's config.

    Args:
      fields: contents of `config.json`.
      generation: contents of `generation_config.json`, if there is one; its end tokens come first.
      source: where the fields are from, for messages.

    Raises:
      ConfigError: a draft's or unknown architecture, or a field that is missing or not supported.
    """
    name = architecture(fields, source)
    if name not in FAMILIES:
        raise ConfigError(f"{source} is of a draft ({name}), but a target must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    fields = {**_DEFAULTS[family], **fields}
    return TargetConfig(
        **_sizes(fields, source),
        layers=_target_layers(family, fields, source),
        qk_norm=family != "llama",
        attention_bias=bool(fields.get("attention_bias", False)),
        family=family,
        mlp_bias=family == "llama" and bool(fields.get("mlp_bias", False)),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position=int(fields["max_position_embeddings"]),
        eos_token_ids=_eos_token_ids(generation or {}, fields),
        bos_token_id=fields.get("bos_token_id"),
    )


def draft_config(fields: Fields, mask_token_id: int | None = None, source: str = "config.json") -> DraftConfig:
    """A draft's config.

    Args:
      fields: contents of `config.json`; options in its `dflash_config` win over the top level.
      mask_token_id: the user's, in place of the config's.
      source: where the fields are from, for messages.

    Raises:
      ConfigError: a target's or unknown architecture, or a field that is missing or not supported.
    """
    name = architecture(fields, source)
    if name not in DRAFTS:
        raise ConfigError(f"{source} is of a target ({name}), but a draft must be one of {', '.join(DRAFTS)}")
    # The user's checkpoint decides on its window; unlike a target's, its `use_sliding_window` may be left out.
    fields = {**_QWEN3, "sliding_window": None, **fields}
    options = {**fields, **(fields.get("dflash_config") or {})}
    if mask_token_id is None:
        mask_token_id = options.get("mask_token_id")
    if mask_token_id is None:
        raise ConfigError(
            f"mask_token_id is missing from {source}, so the user must give it as `draft.mask_token_id`: "
            "the token the draft was trained to find at the positions it drafts"
        )
    second = DRAFTS[name] == 2
    softcap = options.get("final_logit_softcapping")
    return DraftConfig(
        **_sizes(fields, source),
        layers=_draft_layers(fields, options.get("is_causal"), source),
        qk_norm=True,
        attention_bias=bool(fields.get("attention_bias", False)),
        block_size=int(_default(options, "block_size", 16)),
        mask_token_id=int(mask_token_id),
        target_layer_ids=_target_layer_ids(options, source),
        num_target_layers=int(fields.get("num_target_layers") or 0),
        input_embedding_scale=float(_default(options, "input_embedding_scale", 1.0)),
        output_multiplier=float(_default(options, "output_multiplier", 1.0)),
        final_logit_softcap=float(softcap) if softcap is not None and softcap > 0 else None,
        conv=ConvConfig(*_integers(options, source, "conv_kernel_size", "conv_group_size")) if second else None,
        selector=SelectorConfig(*_integers(options, source, "selector_rank", "selector_top_k")) if second else None,
    )


def _sizes(fields: Fields, source: str) -> dict[str, Any]:
    """What `TransformerConfig` takes from fields that every family spells alike."""
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} in {source} is not supported; it must be 'silu'")
    vocab, hidden, heads, inner = _integers(
        fields, source, "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"
    )
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": int(_default(fields, "num_key_value_heads", heads)),
        "head_dim": int(_default(fields, "head_dim", hidden // heads)),
        "intermediate_size": inner,
        "rms_norm_eps": float(_default(fields, "rms_norm_eps", 1e-6)),
        "rope": read_rope(fields, int(fields["max_position_embeddings"]), source),
    }


def _target_layers(family: Family, fields: Fields, source: str) -> tuple[LayerConfig, ...]:
    (depth,) = _integers(fields, source, "num_hidden_layers")
    if family == "llama":
        return (LayerConfig(),) * depth
    window = fields["sliding_window"] if fields.get("use_sliding_window") else None
    if family == "qwen3":
        types = _layer_types(fields, depth, window, source)
        return tuple(LayerConfig(window=_window(kind, window, source)) for kind in types)
    moe = MoeConfig(
        num_experts=int(fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]),
        experts_per_token=int(fields["num_experts_per_tok"]),
        intermediate_size=int(fields["moe_intermediate_size"]),
        normalize_top_k=bool(fields.get("norm_topk_prob", False)),
    )
    dense, step = fields.get("mlp_only_layers") or (), int(fields["decoder_sparse_step"])

    def sparse(index: int) -> bool:
        return index not in dense and moe.num_experts > 0 and (index + 1) % step == 0

    return tuple(LayerConfig(window=window, moe=moe if sparse(index) else None) for index in range(depth))


def _draft_layers(fields: Fields, is_causal: bool | None, source: str) -> tuple[LayerConfig, ...]:
    (depth,) = _integers(fields, source, "num_hidden_layers")
    window = fields["sliding_window"]
    if fields.get("use_sliding_window") is False:
        window = None
    layers = []
    for kind in _layer_types(fields, depth, window if fields.get("use_sliding_window") else None, source):
        causal = kind == "sliding_attention" if is_causal is None else bool(is_causal)
        layers.append(LayerConfig(window=_window(kind, window, source), causal=causal))
    return tuple(layers)


def _layer_types(fields: Fields, depth: int, window: int | None, source: str) -> list[str]:
    types = fields.get("layer_types")
    if types is None:
        first = fields["max_window_layers"] if window is not None else depth
        return ["full_attention" if index < first else "sliding_attention" for index in range(depth)]
    if len(types) != depth:
        raise ConfigError(f"layer_types in {source} has {len(types)} entries for {depth} layers; it must have one each")
    return types


def _window(kind: str, window: int | None, source: str) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ConfigError(
            f"layer type {kind!r} in {source} is not supported; it must be 'full_attention' or 'sliding_attention'"
        )
    if window is None:
        raise ConfigError(
            f"{source} has layers of type 'sliding_attention' but no window for them; "
            "sliding_window must be a number and use_sliding_window not false"
        )
    return int(window)


def _target_layer_ids(options: Fields, source: str) -> tuple[int, ...]:
    if options.get("target_layer_ids") is not None:
        return tuple(int(index) for index in options["target_layer_ids"])
    if not options.get("num_target_layers"):
        raise ConfigError(
            f"{source} has neither target_layer_ids nor num_target_layers, one of which must say "
            "which layers of the target the draft listens to"
        )
    return default_target_layer_ids(int(options["num_target_layers"]), int(options["num_hidden_layers"]))


def _eos_token_ids(*sources: Fields) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for fields in sources:
        found = fields.get("eos_token_id")
        ids |= dict.fromkeys(found if isinstance(found, list) else [] if found is None else [found])
    return tuple(ids)


def _integers(fields: Fields, source: str, *names: str) -> tuple[int, ...]:
    for name in names:
        if not isinstance(fields.get(name), int) or fields[name] < 1:
            raise ConfigError(f"{name} in {source} is {fields.get(name)!r}, but it must be a positive integer")
    return tuple(fields[name] for name in names)


def _default(fields: Fields, name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value
