"""Models of published sizes without their weights, each with a five-layer DFlash 2 drafter.

Qwen3-8B, Qwen3.8-27B with the drafter published for it, and Qwen3.5-35B-A3B. The last two are hybrids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax.checkpoints.hf_config import draft_config, target_config
from dflash_jax.checkpoints.table import build_params, table
from dflash_jax.engine.state import EngineState, Models, init_state
from dflash_jax.families import Leaf
from dflash_jax.models.config import ConvConfig, DraftConfig, LayerConfig, RopeConfig, SelectorConfig, TargetConfig

DRAFTS = 7
"""Tokens drafted per round: a block of 8 less its anchor."""

QWEN3_8B = dict(
    vocab_size=151_936,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12_288,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    qk_norm=True,
    attention_bias=False,
)
TARGET = TargetConfig(**QWEN3_8B, layers=(LayerConfig(),) * 36)
DRAFT = DraftConfig(
    **QWEN3_8B,
    layers=(LayerConfig(causal=False, window=2048),) * 5,
    block_size=1 + DRAFTS,
    mask_token_id=151_669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
    conv=ConvConfig(taps=2, group_size=16),
    selector=SelectorConfig(rank=256, top_k=16),
)


_GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def published(name: str) -> TargetConfig:
    """A target from its published `config.json`."""
    file = _GOLDEN / "published-targets" / f"{name}.json"
    return target_config(json.loads(file.read_text()), source=str(file))


def pair(name: str) -> tuple[TargetConfig, DraftConfig]:
    """A target and its drafter by name, one of `PAIRS`."""
    if name == "qwen3-8b":
        return TARGET, DRAFT
    if name == "qwen3.8-27b":
        file = _GOLDEN / "published-configs" / "z-lab_Qwen3.8-27B-DFlash2.json"
        return published("Qwen3.8-27B"), draft_config(json.loads(file.read_text()), source=str(file))
    target = published("Qwen3.5-35B-A3B")
    sizes = dict(vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=6144, num_heads=16)
    draft = dataclasses.replace(DRAFT, **sizes, target_layer_ids=(1, 10, 19, 28, 37), num_target_layers=40)
    return target, draft


PAIRS = ("qwen3-8b", "qwen3.8-27b", "qwen3.5-35b-a3b")


def tiny() -> tuple[TargetConfig, DraftConfig]:
    """The same pair shrunk until a CPU can run it, for a look at whether a script works."""
    sizes = dict(vocab_size=256, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96)
    target = dataclasses.replace(TARGET, **sizes, layers=TARGET.layers[:4])
    draft = dataclasses.replace(
        DRAFT, **sizes, layers=DRAFT.layers[:2], mask_token_id=255, target_layer_ids=(0, 1), num_target_layers=4
    )
    return target, draft


def models_with(array: Callable[[Leaf], jax.Array], target: TargetConfig, draft: DraftConfig) -> Models:
    """The pair, every weight made by `array`."""
    target_params, draft_params = (
        build_params(config, {leaf.path: array(leaf) for leaf in table(config)}) for config in (target, draft)
    )
    return Models(target=target_params, target_config=target, draft=draft_params, draft_config=draft)


def abstract_models(target: TargetConfig, draft: DraftConfig, dtype=jnp.bfloat16) -> Models:
    """Shapes and dtypes only."""
    return models_with(lambda leaf: jax.ShapeDtypeStruct(leaf.param_shape, dtype), target, draft)


def abstract_state(models: Models, *, rows: int, num_pages: int, page_size: int, max_model_len: int) -> EngineState:
    """A state of `rows` rows and as many slots, as shapes and dtypes."""
    return jax.eval_shape(
        lambda models: init_state(
            models, rows=rows, slots=rows, num_pages=num_pages, page_size=page_size, max_model_len=max_model_len
        ),
        models,
    )
