"""Families of hybrids: published configs and layouts, what is left out, and what a checkpoint must not say."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints import describe, load_target, save_target
from dflash_jax.checkpoints.hf_config import config_fields, target_config
from dflash_jax.checkpoints.table import table
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models.config import GatedDeltaConfig, LayerConfig

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
TINY = ("tiny-qwen3_5", "tiny-qwen3_5-moe", "tiny-qwen3-next")
BILLIONS = {
    "Qwen3.5-0.8B": 0.75,
    "Qwen3.5-2B": 1.88,
    "Qwen3.5-4B": 4.21,
    "Qwen3.5-9B": 8.95,
    "Qwen3.5-27B": 26.9,
    "Qwen3.8-27B": 26.9,
    "Qwen3.5-35B-A3B": 34.66,
    "Qwen3.5-122B-A10B": 122.1,
    "Qwen3.5-397B-A17B": 396.3,
    "Qwen3-Next-80B-A3B-Instruct": 79.67,
    "Qwen3-Coder-Next": 79.67,
}
"""Parameters of the text models."""


def published(golden, name):
    return json.loads((golden / "published-targets" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", BILLIONS)
def test_published_configs_of_hybrids_are_read(golden, name):
    fields = published(golden, name)
    config = target_config(fields)
    assert len(config.attention_layers) == config.num_layers // 4
    assert config.attention_layers[:2] == (3, 7)
    assert config.rope.rotated(config.head_dim) == 64
    assert config.max_position == 262144
    delta = config.layers[0].gated_delta
    text = fields.get("text_config", fields)
    assert delta == GatedDeltaConfig(16, text["linear_num_value_heads"], 128, 128, 4)
    assert sum(leaf.size for leaf in table(config)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    # A tuple's worth of fields, not the whole model.
    assert target_config(json.loads(json.dumps(config_fields(config)))) == config


@pytest.mark.parametrize("name", TINY)
def test_hybrids_that_transformers_saved_are_saved_again_bit_for_bit(golden, models, tmp_path, name):
    dtype = json.loads((golden / name / "config.json").read_text())["dtype"]
    loaded = load_target(golden / name, dtype)
    save_target(tmp_path / "t", loaded.config, loaded.params, dtype)
    again = load_target(tmp_path / "t", dtype)
    assert again.config == loaded.config
    models.assert_same(again.params, loaded.params)
    before, after = _flat(golden / name), _flat(tmp_path / "t")
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(after[key], array, err_msg=key)


def _flat(directory):
    """Tensors by name, however many experts one of them holds."""
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    for name in [name for name in found if ".experts." in name]:
        array = found.pop(name)
        prefix, part = name.removesuffix(".weight").rsplit(".", 1)
        if array.ndim == 2:
            found[f"{prefix}.{part}"] = array
            continue
        for expert, one in enumerate(array):
            halves = np.split(one, 2) if part == "gate_up_proj" else [one]
            for half, which in zip(halves, ["gate_proj", "up_proj"] if len(halves) == 2 else [part], strict=True):
                found[f"{prefix}.{expert}.{which}"] = half
    return found


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_text_model_comes_out_of_a_checkpoint_that_sees(models, tmp_path, caplog, name):
    config, params = models.targets[name], models.params(models.targets[name])
    directory = save_target(tmp_path / "t", config, params)
    tensors = load_file(directory / "model.safetensors")
    tensors = {key.replace("model.", "model.language_model.", 1): array for key, array in tensors.items()}
    tensors["model.visual.patch_embed.proj.weight"] = np.ones((2, 2), np.float32)
    tensors["mtp.fc.weight"] = tensors["mtp.layers.0.input_layernorm.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, directory / "model.safetensors")
    fields = json.loads((directory / "config.json").read_text())
    kind = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}[name]
    whole = {"architectures": [kind], "text_config": fields, "vision_config": {"depth": 2}}
    (directory / "config.json").write_text(json.dumps(whole))
    found = load_target(directory)
    assert found.config == config
    models.assert_same(found.params, params)
    said = [line for line in caplog.messages if "left out" in line]
    assert len(said) == 1
    assert "the vision tower and the head that predicts several tokens left out" in said[0]
    assert describe(directory).parameters == sum(leaf.size for leaf in table(config))


def test_packed_projections_lie_key_head_by_key_head(models, tmp_path):
    config = models.targets["qwen3_next"]
    params = models.params(config)
    directory = save_target(tmp_path / "t", config, params)
    packed = load_file(directory / "model.safetensors")["model.layers.1.linear_attn.in_proj_qkvz.weight"]
    delta = config.layers[1].gated_delta
    group = delta.num_value_heads // delta.num_key_heads
    weights = params.layers[1].attention
    q, k, v = np.split(np.asarray(weights.in_proj_qkv.out_in), [8, 16])
    z = np.asarray(weights.in_proj_z.out_in)
    wanted = []
    for head in range(delta.num_key_heads):
        key, value = slice(head * 4, head * 4 + 4), slice(head * group * 3, (head + 1) * group * 3)
        wanted += [q[key], k[key], v[value], z[value]]
    np.testing.assert_array_equal(packed, np.concatenate(wanted))


def test_a_packed_projection_of_another_shape_is_named(models, tmp_path):
    config = models.targets["qwen3_next"]
    directory = save_target(tmp_path / "t", config, models.params(config))
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.2.linear_attn.in_proj_ba.weight"
    tensors[name] = tensors[name][:-1]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"in_proj_ba.* has shape \[11, 16\], but .* makes it \[12, 16\]"):
        load_target(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate in config.json is false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer type 'sliding_attention'"),
        ({"layer_types": ["linear_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "no layer is of attention"),
        ({"linear_num_value_heads": 5}, "linear_num_key_heads 2 does not divide linear_num_value_heads 5"),
        ({"linear_conv_kernel_dim": 10**9}, "linear_conv_kernel_dim in config.json is 1000000000"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor 0.1 turns 0 of the 8 channels"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor .*2.0, but it must be 1 or less"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok in config.json is 9"),
        ({"num_experts": 0}, "num_experts in config.json is 0"),
    ],
)
def test_what_a_hybrid_cannot_be_is_named(models, change, message):
    fields = config_fields(models.targets["qwen3_5_moe"])
    with pytest.raises(ConfigError, match=message):
        target_config({**fields, **change})


def test_layers_of_several_shapes_are_refused(models):
    config = models.targets["qwen3_5"]
    other = dataclasses.replace(config.layers[0].gated_delta, value_dim=5)
    with pytest.raises(ConfigError, match="of several shapes"):
        dataclasses.replace(config, layers=(*config.layers, LayerConfig(gated_delta=other)))


def test_a_hybrid_family_writes_no_config_without_gated_delta(models):
    config = dataclasses.replace(models.targets["qwen3_5"], layers=(LayerConfig(),))
    with pytest.raises(ConfigError, match="needs at least one Gated DeltaNet layer"):
        config_fields(config)


@pytest.mark.parametrize("name", HYBRIDS)
def test_zero_centred_norms_come_back_bit_for_bit_however_small(models, tmp_path, name):
    config = models.targets[name]
    params = models.params(config)
    params = params.replace(norm=params.norm * 1e-12)
    models.assert_same(load_target(save_target(tmp_path / "t", config, params)).params, params)
