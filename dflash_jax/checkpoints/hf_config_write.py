"""Model configs to `config.json`, as transformers and the reference package `dflash` load it."""

from __future__ import annotations

from typing import Any

from dflash_jax.checkpoints.hf_config import DRAFTS, FAMILIES
from dflash_jax.checkpoints.rope import write_rope
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import DraftConfig, LayerConfig, TargetConfig, TransformerConfig


def config_fields(config: TargetConfig | DraftConfig, dtype: str = "float32") -> dict[str, Any]:
    """Contents of `config.json` for a model.

    Args:
      config: the model; reading the fields back gives an equal one.
      dtype: what the weights beside it are stored as.

    Raises:
      ConfigError: layers that differ in ways the format cannot say.
    """
    fields = _draft_fields(config) if isinstance(config, DraftConfig) else _target_fields(config)
    return {**fields, "dtype": dtype}


def _common_fields(config: TransformerConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": write_rope(config.rope),
        "attention_bias": config.attention_bias,
    }


def _target_fields(config: TargetConfig) -> dict[str, Any]:
    eos = config.eos_token_ids
    fields = {
        "architectures": [next(name for name, family in FAMILIES.items() if family == config.family)],
        "model_type": config.family,
        **_common_fields(config),
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
    match config.family:
        case "llama":
            return {**fields, "mlp_bias": config.mlp_bias}
        case "qwen3":
            return {**fields, **_window_fields(config.layers)}
        case "qwen3_moe":
            return {**fields, **_moe_fields(config)}


def _window_fields(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    windows = {layer.window for layer in layers if layer.window is not None}
    if len(windows) > 1:
        raise ConfigError(f"layers have windows {sorted(windows)}, but config.json can say only one for all")
    return {
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in layers],
        "sliding_window": windows.pop() if windows else None,
        "use_sliding_window": any(layer.window is not None for layer in layers),
    }


def _moe_fields(config: TargetConfig) -> dict[str, Any]:
    windows = {layer.window for layer in config.layers}
    kinds = {layer.moe for layer in config.layers if layer.moe is not None}
    if len(windows) > 1 or len(kinds) != 1:
        raise ConfigError("a qwen3_moe config.json needs the same window and the same experts in every layer")
    window, moe = windows.pop(), kinds.pop()
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, layer in enumerate(config.layers) if layer.moe is None],
    }


def _draft_fields(config: DraftConfig) -> dict[str, Any]:
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
        "architectures": [next(name for name, version in DRAFTS.items() if version == config.version)],
        "model_type": "qwen3",
        **_common_fields(config),
        **_window_fields(config.layers),
        **_causal_fields(config.layers),
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "dflash_config": options,
    }


def _causal_fields(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
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
