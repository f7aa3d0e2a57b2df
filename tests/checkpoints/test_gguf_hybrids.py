"""Hybrids in GGUF files, laid out as llama.cpp's `conversion/qwen.py` lays them out.

The writer here goes the other way than the reader: from whole heads to tiles, by loops.
"""

from __future__ import annotations

import dataclasses
import logging

import gguf
import numpy as np
import pytest

from dflash_jax.checkpoints import describe, load_target
from dflash_jax.checkpoints.table import param_at, table
from dflash_jax.errors import CheckpointError
from dflash_jax.families import FAMILIES
from dflash_jax.models.config import GatedDeltaConfig, LayerConfig, MoeConfig, RopeConfig, TargetConfig

DELTA = GatedDeltaConfig(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=8, conv_width=4)
MOE = MoeConfig(3, 2, 32, True, 48)
BASE = {
    "vocab_size": 24,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "rms_norm_eps": float(np.float32(1e-6)),
    "rope": RopeConfig(1e7, partial=0.25),
    "qk_norm": True,
    "attention_bias": False,
    "attention_gate": True,
    "zero_centred_norms": True,
    "max_position": 512,
}
CONFIGS = {
    "qwen3_5": TargetConfig(
        **BASE, family="qwen3_5", layers=(LayerConfig(gated_delta=DELTA), LayerConfig(gated_delta=DELTA), LayerConfig())
    ),
    "qwen3_5_moe": TargetConfig(
        **{**BASE, "intermediate_size": 2 * 32 + 48},
        family="qwen3_5_moe",
        tied_embeddings=True,
        layers=(LayerConfig(gated_delta=DELTA, moe=MOE), LayerConfig(moe=MOE)),
    ),
    "qwen3_next": TargetConfig(
        **BASE,
        family="qwen3_next",
        layers=(LayerConfig(gated_delta=DELTA, moe=MOE), LayerConfig(moe=MOE), LayerConfig(gated_delta=DELTA, moe=MOE)),
    ),
}

PLAIN = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "input_norm": "attn_norm.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "attention.q_proj.weight": "attn_q.weight",
    "attention.k_proj.weight": "attn_k.weight",
    "attention.v_proj.weight": "attn_v.weight",
    "attention.o_proj.weight": "attn_output.weight",
    "attention.q_norm": "attn_q_norm.weight",
    "attention.k_norm": "attn_k_norm.weight",
    "attention.in_proj_qkv": "attn_qkv.weight",
    "attention.in_proj_z": "attn_gate.weight",
    "attention.in_proj_b": "ssm_beta.weight",
    "attention.in_proj_a": "ssm_alpha.weight",
    "attention.conv": "ssm_conv1d.weight",
    "attention.a_log": "ssm_a",
    "attention.dt_bias": "ssm_dt.bias",
    "attention.norm": "ssm_norm.weight",
    "attention.out_proj": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.router": "ffn_gate_inp.weight",
    "mlp.gate_proj": "ffn_gate_exps.weight",
    "mlp.up_proj": "ffn_up_exps.weight",
    "mlp.down_proj": "ffn_down_exps.weight",
    "mlp.shared.gate": "ffn_gate_inp_shexp.weight",
    "mlp.shared.mlp.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared.mlp.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared.mlp.down_proj.weight": "ffn_down_shexp.weight",
}


def tiles(array, width, axis=0):
    """Value heads of `width` rows: the first of each key head, then the second of each, and so on."""
    heads = np.split(array, DELTA.num_value_heads, axis=axis)
    assert heads[0].shape[axis] == width
    group = DELTA.num_value_heads // DELTA.num_key_heads
    order = [key * group + place for place in range(group) for key in range(DELTA.num_key_heads)]
    return np.concatenate([heads[head] for head in order], axis=axis)


def tiled(part, array):
    keys = 2 * DELTA.num_key_heads * DELTA.key_dim
    if part in ("in_proj_qkv", "conv"):
        return np.concatenate([array[:keys], tiles(array[keys:], DELTA.value_dim)])
    if part == "in_proj_z":
        return tiles(array, DELTA.value_dim)
    if part in ("in_proj_a", "in_proj_b", "a_log", "dt_bias"):
        return tiles(array, 1)
    return tiles(array, DELTA.value_dim, axis=1) if part == "out_proj" else array


def stored(config, params):
    """GGUF tensors by name."""
    found = {}
    for leaf in table(config):
        array = np.asarray(param_at(params, leaf.path))
        array = np.swapaxes(array, -1, -2) if leaf.transposed else array
        prefix, part = "", leaf.path
        if leaf.path.startswith("layers"):
            _, index, part = leaf.path.split(".", 2)
            prefix = f"blk.{index}."
        of_delta = bool(prefix) and config.layers[int(index)].gated_delta is not None and part.startswith("attention.")
        if part == "attention.a_log":
            array = -np.exp(array)
        elif part.endswith("norm") and not (of_delta and part == "attention.norm"):
            array = array + 1
        elif part == "mlp.shared.gate":
            array = array[0]
        if of_delta and config.family != "qwen3_next":
            array = tiled(part.removeprefix("attention."), array)
        found[prefix + PLAIN[part]] = np.ascontiguousarray(array)
    if config.family == "qwen3_next":
        _pack_ba(config, found)
    return found


def _pack_ba(config, found):
    for index in config.gated_delta_layers:
        b, a = (found.pop(f"blk.{index}.ssm_{part}.weight") for part in ("beta", "alpha"))
        group = DELTA.num_value_heads // DELTA.num_key_heads
        rows = []
        for key in range(DELTA.num_key_heads):
            rows += [b[key * group : (key + 1) * group], a[key * group : (key + 1) * group]]
        found[f"blk.{index}.ssm_ba.weight"] = np.concatenate(rows)


def pack_qkvz(found, index):
    """As older files of Qwen3-Next have it."""
    qkv, z = found.pop(f"blk.{index}.attn_qkv.weight"), found.pop(f"blk.{index}.attn_gate.weight")
    width, group = DELTA.key_dim, DELTA.num_value_heads // DELTA.num_key_heads
    q, k, v = np.split(qkv, [2 * width, 4 * width])
    rows = []
    for key in range(DELTA.num_key_heads):
        ours = slice(key * width, (key + 1) * width)
        values = slice(key * group * DELTA.value_dim, (key + 1) * group * DELTA.value_dim)
        rows += [q[ours], k[ours], v[values], z[values]]
    found[f"blk.{index}.ssm_in.weight"] = np.concatenate(rows)


def write(file, config, found, *, blocks=0, metadata=()):
    writer = gguf.GGUFWriter(file, FAMILIES[config.family].gguf.architecture)
    writer.add_block_count(config.num_layers + blocks)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    if config.family != "qwen3_5_moe":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.rotated(config.head_dim))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(DELTA.conv_width)
    writer.add_ssm_state_size(DELTA.key_dim)
    writer.add_ssm_group_count(DELTA.num_key_heads)
    writer.add_ssm_time_step_rank(DELTA.num_value_heads)
    writer.add_ssm_inner_size(DELTA.values)
    kinds = [layer.gated_delta is not None for layer in config.layers]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", kinds + [False] * blocks)
    if moe := config.layers[0].moe:
        writer.add_expert_count(moe.num_experts)
        writer.add_expert_used_count(moe.experts_per_token)
        writer.add_expert_feed_forward_length(moe.intermediate_size)
        writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)
    for key, value in metadata:
        getattr(writer, key)(value)
    for name, array in found.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def params_of(models, config):
    """Random weights that -exp and +1 and back leave nearly as they are."""
    params = models.params(config)
    layers = []
    for layer in params.layers:
        if hasattr(layer.attention, "a_log"):
            layer = layer.replace(attention=layer.attention.replace(a_log=np.float32([-2, -1, 0, 0.5, 1, 2])))
        layers.append(layer)
    return params.replace(layers=tuple(layers))


def assert_close(config, found, params):
    for leaf in table(config):
        one, other = np.asarray(param_at(found, leaf.path)), np.asarray(param_at(params, leaf.path))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6, err_msg=leaf.path)


@pytest.mark.parametrize("name", CONFIGS)
def test_hybrids_in_gguf_come_back_as_converted(models, tmp_path, name):
    config = CONFIGS[name]
    params = params_of(models, config)
    file = write(tmp_path / "m.gguf", config, stored(config, params))
    loaded = load_target(file)
    assert loaded.config == config
    assert_close(config, loaded.params, params)
    assert describe(file).parameters == sum(leaf.size for leaf in table(config))


def test_qwen3_next_in_older_gguf_files_has_its_projections_packed(models, tmp_path):
    config = CONFIGS["qwen3_next"]
    params = params_of(models, config)
    found = stored(config, params)
    for index in config.gated_delta_layers:
        pack_qkvz(found, index)
    assert_close(config, load_target(write(tmp_path / "m.gguf", config, found)).params, params)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_blocks_that_predict_several_tokens_are_left_out_of_gguf(models, tmp_path, caplog, name):
    config = CONFIGS[name]
    params = params_of(models, config)
    found = stored(config, params)
    extra = config.num_layers
    last = config.attention_layers[-1]
    ours = {key: array for key, array in found.items() if key.startswith(f"blk.{last}.")}
    found |= {key.replace(f"blk.{last}.", f"blk.{extra}."): array for key, array in ours.items()}
    found[f"blk.{extra}.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    found[f"blk.{extra}.nextn.enorm.weight"] = np.ones(64, np.float32)
    file = write(tmp_path / "m.gguf", config, found, blocks=1, metadata=[("add_nextn_predict_layers", 1)])
    with caplog.at_level(logging.WARNING):
        loaded = load_target(file)
    assert loaded.config == config
    assert_close(config, loaded.params, params)
    assert sum("the head that predicts several tokens left out" in line for line in caplog.messages) == 1


def test_fused_experts_in_gguf_are_split(models, tmp_path):
    config = CONFIGS["qwen3_5_moe"]
    params = params_of(models, config)
    found = stored(config, params)
    for index in range(config.num_layers):
        both = [found.pop(f"blk.{index}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        found[f"blk.{index}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    assert_close(config, load_target(write(tmp_path / "m.gguf", config, found)).params, params)


def test_layers_of_gguf_come_in_an_interval_where_nothing_says_more(models, tmp_path, monkeypatch):
    config = CONFIGS["qwen3_5"]
    params = params_of(models, config)
    monkeypatch.setattr(gguf.GGUFWriter, "add_array", lambda *_: None)
    for interval, kinds in ((3, (True, True, False)), (2, (True, False, True))):
        layers = tuple(LayerConfig(gated_delta=DELTA if delta else None) for delta in kinds)
        other = dataclasses.replace(config, layers=layers)
        metadata = [("add_full_attention_interval", interval)]
        file = write(tmp_path / f"{interval}.gguf", other, stored(config, params), metadata=metadata)
        if other == config:
            assert load_target(file).config == config
        else:
            with pytest.raises(CheckpointError, match=r"attn_q\.weight|self_attn\.q_proj"):
                load_target(file)


def test_a_gguf_hybrid_that_contradicts_itself_is_named(models, tmp_path):
    config = CONFIGS["qwen3_5"]
    found = stored(config, params_of(models, config))
    file = write(tmp_path / "m.gguf", config, found, metadata=[("add_nextn_predict_layers", 3)])
    with pytest.raises(CheckpointError, match="3 blocks, 3 of them to predict several tokens"):
        load_target(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_array", lambda self, key, value: self.add_string(key, "all"))
        file = write(tmp_path / "n.gguf", config, found)
    with pytest.raises(CheckpointError, match=r"recurrent_layers in the metadata of .* is 'all', but it must be"):
        load_target(file)


@pytest.mark.parametrize("value", [0.25, 0.0])
def test_a_decay_that_no_conversion_writes_is_refused_by_its_value(models, tmp_path, value):
    config = CONFIGS["qwen3_5"]
    found = stored(config, params_of(models, config))
    found["blk.1.ssm_a"][3] = value
    with pytest.raises(
        CheckpointError, match=rf"tensor 'blk.1.ssm_a' in .*m.gguf has {value} among its values, but each"
    ):
        load_target(write(tmp_path / "m.gguf", config, found))
