import dataclasses
import json

import numpy as np
import pytest

from dflash_jax.checkpoints.hf_config import config_fields, draft_config, target_config
from dflash_jax.errors import ConfigError
from dflash_jax.families.rope import read_rope, write_rope
from dflash_jax.models.config import ConvConfig, LayerConfig, MoeConfig, SelectorConfig
from dflash_jax.models.layers import inverse_wavelengths


@pytest.fixture
def published(golden):
    return {file.stem: json.loads(file.read_text()) for file in (golden / "published-configs").glob("*.json")}


def target_fields(architecture="Qwen3ForCausalLM", **more):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "intermediate_size": 96,
    }
    return {"architectures": [architecture], **sizes, **more}


def draft_fields(**more):
    return {
        **target_fields("DFlash2DraftModel"),
        "num_target_layers": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 4,
        "selector_top_k": 8,
        "mask_token_id": 9,
        **more,
    }


def test_published_dflash2_of_qwen38_27b(published):
    config = draft_config(published["z-lab_Qwen3.8-27B-DFlash2"])
    assert config.layers == (LayerConfig(window=2048, causal=False),) * 5
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (5120, 32, 8, 128)
    assert (config.vocab_size, config.intermediate_size, config.block_size) == (248320, 17408, 8)
    assert config.target_layer_ids == (5, 19, 33, 47, 61)
    assert (config.mask_token_id, config.num_target_layers) == (248070, 64)
    assert (config.conv, config.selector) == (ConvConfig(2, 16), SelectorConfig(256, 16))
    assert config.rope.theta == 1e7


def test_published_dflash1_with_mixed_layers_is_causal_where_it_slides(published):
    config = draft_config(published["z-lab_Qwen3.5-4B-DFlash"])
    assert config.layers == (LayerConfig(window=4096, causal=True),) * 5 + (LayerConfig(window=None, causal=False),)
    assert (config.version, config.block_size, len(config.target_layer_ids)) == (1, 16, 8)


def test_published_dflash1_with_options_at_both_levels(published):
    config = draft_config(published["z-lab_Qwen3-4B-DFlash-b16"])
    assert (config.block_size, config.mask_token_id, config.rope.theta) == (16, 151669, 1e6)
    assert config.layers == (LayerConfig(causal=False),) * 5


def test_published_config_without_mask_token_asks_the_user_for_it(published):
    fields = published["specforge_qwen3-8b-dflash"]
    with pytest.raises(ConfigError, match=r"mask_token_id is missing from here/config.json.*draft\.mask_token_id"):
        draft_config(fields, source="here/config.json")
    config = draft_config(fields, mask_token_id=7)
    assert (config.mask_token_id, config.target_layer_ids) == (7, (1, 9, 17, 25, 33))


def test_given_mask_token_wins():
    assert draft_config(draft_fields(), mask_token_id=3).mask_token_id == 3


def test_nested_draft_options_win_over_the_top_level():
    nested = {"block_size": 4, "selector_top_k": 3, "mask_token_id": 1, "final_logit_softcapping": 0}
    config = draft_config(draft_fields(block_size=9, final_logit_softcapping=5.0, dflash_config=nested))
    assert (config.block_size, config.selector.top_k, config.mask_token_id) == (4, 3, 1)
    assert config.final_logit_softcap is None


def test_draft_windows_and_causality_resolve_independently():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    fields = draft_fields(layer_types=kinds, sliding_window=16)
    assert [(layer.window, layer.causal) for layer in draft_config(fields).layers[:2]] == [(16, True), (None, False)]
    fields["is_causal"] = True
    assert [(layer.window, layer.causal) for layer in draft_config(fields).layers[:2]] == [(16, True), (None, True)]
    fields["is_causal"] = False
    assert [(layer.window, layer.causal) for layer in draft_config(fields).layers[:2]] == [(16, False), (None, False)]


@pytest.mark.parametrize("more", [{"sliding_window": None}, {"sliding_window": 8, "use_sliding_window": False}, {}])
def test_sliding_layer_without_a_window_is_refused(more):
    with pytest.raises(ConfigError, match="no window"):
        draft_config(draft_fields(layer_types=["sliding_attention"] * 4, **more))


def test_defaults_are_those_of_transformers():
    qwen = target_config(target_fields())
    assert (qwen.head_dim, qwen.num_kv_heads, qwen.rope.theta, qwen.rms_norm_eps) == (128, 32, 10_000.0, 1e-6)
    assert (qwen.tied_embeddings, qwen.max_position, qwen.eos_token_ids) == (False, 32768, ())
    llama = target_config(target_fields("LlamaForCausalLM"))
    assert (llama.head_dim, llama.num_kv_heads, llama.max_position) == (8, 32, 2048)
    assert (llama.eos_token_ids, llama.bos_token_id, llama.qk_norm) == ((2,), 1, False)


def test_target_windows_follow_use_sliding_window():
    fields = target_fields(sliding_window=16, max_window_layers=3)
    assert {layer.window for layer in target_config(fields).layers} == {None}
    windows = [layer.window for layer in target_config({**fields, "use_sliding_window": True}).layers]
    assert windows == [None, None, None, 16]


def test_moe_layers_follow_step_and_exceptions():
    fields = target_fields(
        "Qwen3MoeForCausalLM",
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    )
    moe = MoeConfig(8, 2, 12, True)
    assert [layer.moe for layer in target_config(fields).layers] == [None, None, None, moe]
    del fields["num_local_experts"]
    assert target_config({**fields, "num_experts": 6}).layers[3].moe.num_experts == 6


def test_end_tokens_of_the_generation_config_come_first():
    config = target_config(target_fields(eos_token_id=[4, 7]), {"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (9, 7, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (target_fields("GemmaForCausalLM"), "'GemmaForCausalLM'.*Qwen3ForCausalLM.*DFlash2DraftModel"),
        (target_fields("DFlashDraftModel"), "of a draft"),
        ({**target_fields(), "architectures": None}, "no 'architectures'"),
        (target_fields(hidden_act="gelu"), "hidden_act 'gelu'"),
        ({**target_fields(), "hidden_size": None}, "hidden_size in config.json is None"),
        (target_fields(layer_types=["full_attention"]), "1 entries for 4 layers"),
        (target_fields(layer_types=["linear_attention"] * 4), "'linear_attention'"),
        (target_fields(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic'"),
        (target_fields(rope_scaling={"type": "linear"}), "factor is missing"),
        (target_fields(rope_scaling={"type": "yarn", "factor": 2.0, "truncate": False}), "truncate"),
        (target_fields(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (
            target_fields(layer_types=["sliding_attention"] * 4, sliding_window=0, use_sliding_window=True),
            "window of 0",
        ),
    ],
)
def test_what_is_not_supported_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        target_config(fields)


def test_a_target_is_no_draft():
    with pytest.raises(ConfigError, match="of a target"):
        draft_config(target_fields())


def test_draft_without_layers_to_listen_to_is_refused():
    with pytest.raises(ConfigError, match="neither target_layer_ids nor num_target_layers"):
        draft_config({**draft_fields(), "num_target_layers": None})


def test_both_spellings_of_rope_mean_the_same():
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = read_rope({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}}, 64, "x")
    new = read_rope({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **llama3}}, 64, "x")
    assert old == new
    assert (old.kind, old.theta, old.original_max_position) == ("llama3", 5e5, 32)


# Frozen from transformers 5.15.0, `LlamaRotaryEmbedding` with head_dim 16.
ROPE_CASES = [
    (
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05],
        1.0,
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000000.0, "original_max_position_embeddings": 64},
        [1.0, 0.11114246, 0.0079056947, 0.0014058533, 0.00025, 4.4456985e-05, 7.9056936e-06, 1.4058534e-06],
        1.138629436111989,
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "beta_fast": 16.0,
        },
        [1.0, 0.31622776, 0.1, 0.03162278, 0.0067499992, 0.0011067971, 2.4999999e-05, 7.9056945e-06],
        0.9210423553163399,
    ),
]


@pytest.mark.parametrize(("parameters", "wavelengths", "attention_factor"), ROPE_CASES)
def test_stretched_rope_is_that_of_transformers(parameters, wavelengths, attention_factor):
    rope = read_rope({"rope_parameters": parameters}, 256, "x")
    np.testing.assert_allclose(inverse_wavelengths(rope, 16), wavelengths, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert read_rope({"rope_parameters": write_rope(rope)}, 256, "x") == rope


def test_yarn_without_factor_takes_it_from_the_context_lengths():
    rope = read_rope({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, 256, "x")
    assert rope.factor == 4.0


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_target_config_survives_json(models, name):
    config = models.targets[name]
    assert target_config(json.loads(json.dumps(config_fields(config)))) == config


@pytest.mark.parametrize("name", ["dflash1", "dflash2"])
def test_draft_config_survives_json(models, name):
    config = models.drafts[name]
    assert draft_config(json.loads(json.dumps(config_fields(config)))) == config


def test_draft_that_json_cannot_say_is_refused(models):
    layers = (LayerConfig(window=7, causal=False), LayerConfig(causal=True))
    with pytest.raises(ConfigError, match="is_causal"):
        config_fields(dataclasses.replace(models.drafts["dflash1"], layers=layers))
    layers = (LayerConfig(window=7), LayerConfig(window=8))
    with pytest.raises(ConfigError, match=r"windows \[7, 8\]"):
        config_fields(dataclasses.replace(models.drafts["dflash1"], layers=layers))
