from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.table import build_params, table
from dflash_jax.models.config import (
    ConvConfig,
    DraftConfig,
    GatedDeltaConfig,
    LayerConfig,
    MoeConfig,
    RopeConfig,
    SelectorConfig,
    TargetConfig,
)

GOLDEN = Path(__file__).parents[1] / "golden"

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-5,
}
QWEN3 = TargetConfig(
    **SIZES,
    rope=RopeConfig(theta=1e6),
    layers=(LayerConfig(), LayerConfig(window=5)),
    qk_norm=True,
    attention_bias=True,
    family="qwen3",
    max_position=512,
    eos_token_ids=(3, 5),
)
LLAMA = TargetConfig(
    **SIZES,
    rope=RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0),
    layers=(LayerConfig(),) * 2,
    qk_norm=False,
    attention_bias=True,
    family="llama",
    mlp_bias=True,
    tied_embeddings=True,
    max_position=512,
    eos_token_ids=(2,),
    bos_token_id=1,
)
MOE = TargetConfig(
    **SIZES,
    rope=RopeConfig(1e4, "yarn", 4.0, 128, beta_fast=16.0, attention_factor=1.25),
    layers=(LayerConfig(window=9, moe=MoeConfig(3, 2, 6, True)), LayerConfig(window=9)),
    qk_norm=True,
    attention_bias=False,
    family="qwen3_moe",
    max_position=512,
)
DFLASH1 = DraftConfig(
    **SIZES,
    rope=RopeConfig(1e4, "linear", 2.0),
    layers=(LayerConfig(window=7, causal=True), LayerConfig(causal=False)),
    qk_norm=True,
    attention_bias=True,
    block_size=8,
    mask_token_id=23,
    target_layer_ids=(0, 2, 3),
    num_target_layers=5,
)
DFLASH2 = DraftConfig(
    **SIZES,
    rope=RopeConfig(1e4),
    layers=(LayerConfig(window=7, causal=False),) * 2,
    qk_norm=True,
    attention_bias=False,
    block_size=4,
    mask_token_id=22,
    target_layer_ids=(1, 0),
    num_target_layers=3,
    input_embedding_scale=1.5,
    output_multiplier=0.5,
    final_logit_softcap=20.0,
    conv=ConvConfig(3, 4),
    selector=SelectorConfig(5, 6),
)
DELTA = GatedDeltaConfig(num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=3, conv_width=3)
_HYBRID = {
    **SIZES,
    "rope": RopeConfig(1e6, partial=0.25),
    "qk_norm": True,
    "attention_bias": False,
    "attention_gate": True,
    "zero_centred_norms": True,
    "max_position": 512,
}
QWEN35 = TargetConfig(
    **_HYBRID,
    layers=(LayerConfig(gated_delta=DELTA), LayerConfig(), LayerConfig(gated_delta=DELTA)),
    family="qwen3_5",
    tied_embeddings=True,
    eos_token_ids=(3,),
)
QWEN35_MOE = TargetConfig(
    **_HYBRID,
    layers=(
        LayerConfig(gated_delta=DELTA, moe=MoeConfig(3, 2, 6, True, 5)),
        LayerConfig(moe=MoeConfig(3, 2, 6, True, 5)),
    ),
    family="qwen3_5_moe",
)
QWEN3_NEXT = TargetConfig(
    **_HYBRID,
    layers=(
        LayerConfig(moe=MoeConfig(3, 2, 6, False, 5)),
        LayerConfig(gated_delta=DELTA, moe=MoeConfig(3, 2, 6, False, 5)),
        LayerConfig(gated_delta=DELTA),
    ),
    family="qwen3_next",
)
TARGETS = {
    "qwen3": QWEN3,
    "llama": LLAMA,
    "qwen3_moe": MOE,
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35_MOE,
    "qwen3_next": QWEN3_NEXT,
}
DRAFTS = {"dflash1": DFLASH1, "dflash2": DFLASH2}


def random_params(config):
    rng = np.random.default_rng(0)
    return build_params(
        config, {leaf.path: jnp.asarray(rng.normal(size=leaf.param_shape), jnp.float32) for leaf in table(config)}
    )


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=jax.tree_util.keystr(path))


@pytest.fixture
def golden() -> Path:
    return GOLDEN


@pytest.fixture
def models():
    """Small configs of every family by name, random params for them, and bitwise comparison."""

    class Models:
        targets = TARGETS
        drafts = DRAFTS
        params = staticmethod(random_params)
        assert_same = staticmethod(assert_same)

    return Models
