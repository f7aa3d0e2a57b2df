"""The draft that a run starts from: a checkpoint, or the config of a fresh one."""

from __future__ import annotations

import dataclasses

from dflash_jax.checkpoints import LoadedTarget, load_draft
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import (
    ConvConfig,
    DraftConfig,
    LayerConfig,
    SelectorConfig,
    TargetConfig,
    check_pair,
    default_target_layer_ids,
)
from dflash_jax.models.weights import DraftParams
from dflash_jax.training.config import DraftSection, TrainConfig
from dflash_jax.training.data.dataset import Dataset


def starting_draft(config: TrainConfig, target: LoadedTarget) -> tuple[DraftParams | None, DraftConfig]:
    """The draft's config, and its weights if it starts from a checkpoint."""
    section = config.draft
    if section.path is None:
        return None, fresh_config(section, target.config)
    extra = sorted(section.model_fields_set - {"path"})
    if extra:
        raise ConfigError(f"draft.path is given, so draft.{extra[0]} must not be: the checkpoint decides it")
    loaded = load_draft(section.path)
    check_pair(target.config, loaded.config)
    return loaded.params, loaded.config


def fresh_config(section: DraftSection, target: TargetConfig) -> DraftConfig:
    """The config of a fresh draft of a target's own shape.

    Raises:
      ConfigError: sizes that contradict each other or the target, or no mask token.
    """
    if section.mask_token_id is None:
        raise ConfigError("draft.mask_token_id is missing; it must be a token that never occurs in text")
    windows = section.windows or (None,) * section.num_layers
    if len(windows) != section.num_layers:
        raise ConfigError(
            f"draft.windows has {len(windows)} entries for {section.num_layers} layers; it must have one each"
        )
    second = section.version == 2
    config = DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=section.intermediate_size or target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        # A draft's config.json cannot say that a part of each head turns.
        rope=dataclasses.replace(target.rope, partial=1.0),
        layers=tuple(LayerConfig(window=window, causal=section.causal) for window in windows),
        qk_norm=True,
        attention_bias=False,
        block_size=section.block_size,
        mask_token_id=section.mask_token_id,
        target_layer_ids=section.target_layer_ids or default_target_layer_ids(target.num_layers, section.num_layers),
        num_target_layers=target.num_layers,
        conv=ConvConfig(section.conv_taps, section.conv_group_size) if second else None,
        selector=SelectorConfig(section.selector_rank, section.selector_top_k) if second else None,
    )
    check_pair(target, config)
    return config


def check_mask_token(mask: int, target: TargetConfig, dataset: Dataset) -> None:
    """Raises ConfigError unless the mask token means nothing else."""
    if mask in target.eos_token_ids:
        raise ConfigError(
            f"mask_token_id {mask} is a stop token of the target ({list(target.eos_token_ids)}); "
            "it must be a token that ends nothing"
        )
    if dataset.token_counts[mask]:
        raise ConfigError(
            f"mask_token_id {mask} occurs {dataset.token_counts[mask]} times in the data; "
            "it must be a token that never occurs in text"
        )
