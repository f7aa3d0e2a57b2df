import dataclasses
import re

import gguf
import numpy as np
import pytest

from dflash_jax.checkpoints import describe, load_draft, load_target
from dflash_jax.checkpoints.table import param_at, table
from dflash_jax.errors import CheckpointError
from dflash_jax.families import FAMILIES
from dflash_jax.models.config import LayerConfig, MoeConfig, RopeConfig, TargetConfig
from dflash_jax.models.layers import inverse_wavelengths

Kind = gguf.GGMLQuantizationType

# K-quants come in blocks of 256, so that no axis may be smaller.
BASE = TargetConfig(
    vocab_size=24,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    rms_norm_eps=float(np.float32(1e-5)),
    rope=RopeConfig(theta=5e5),
    layers=(LayerConfig(),),
    qk_norm=True,
    attention_bias=False,
    family="qwen3",
    max_position=512,
)
LLAMA = dataclasses.replace(BASE, qk_norm=False, family="llama", tied_embeddings=True)
MOE = dataclasses.replace(BASE, family="qwen3_moe", layers=(LayerConfig(moe=MoeConfig(3, 2, 256, True)),))

NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "input_norm": "attn_norm.weight",
    "post_attention_norm": "ffn_norm.weight",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.q_norm": "attn_q_norm.weight",
    "attention.k_norm": "attn_k_norm.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp.weight",
}


def gguf_name(leaf):
    path = leaf.path
    if not path.startswith("layers"):
        return NAMES[path]
    _, index, part = path.split(".", 2)
    if leaf.experts:
        return f"blk.{index}.{NAMES[part]}_exps.weight"
    stem, _, kind = part.rpartition(".")
    return f"blk.{index}." + (NAMES[part] if part in NAMES else f"{NAMES[stem]}.{kind}")


def interleave(array, heads):
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(file, config, params, kind=Kind.F32, extra=(), metadata=(), skip=()):
    arch = FAMILIES[config.family].gguf.architecture
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if moe := next((layer.moe for layer in config.layers if layer.moe), None):
        writer.add_expert_count(moe.num_experts)
        writer.add_expert_used_count(moe.experts_per_token)
        writer.add_expert_feed_forward_length(moe.intermediate_size)
    for key, value in metadata:
        getattr(writer, key)(value)
    for leaf in table(config):
        name = gguf_name(leaf)
        array = np.asarray(param_at(params, leaf.path))
        array = np.swapaxes(array, -1, -2) if leaf.transposed else array
        if config.family == "llama" and re.search(r"attn_[qk]\.", name):
            array = interleave(array, config.num_heads if "attn_q" in name else config.num_kv_heads)
        if name in skip:
            continue
        if array.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(name, data, raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)
    for name, data, raw in extra:
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("config", [BASE, LLAMA, MOE], ids=["qwen3", "llama", "qwen3moe"])
def test_every_family_comes_back_as_written(models, tmp_path, config):
    params = models.params(config)
    file = write_gguf(tmp_path / "m.gguf", config, params)
    loaded = load_target(file)
    assert loaded.config == config
    assert loaded.tokenizer is None
    models.assert_same(loaded.params, params)
    found = describe(file)
    assert (found.format, found.config, found.bytes_on_disk) == ("gguf", config, file.stat().st_size)
    assert found.parameters == sum(leaf.size for leaf in table(config))


def test_llama_biases_are_unpermuted_too(models, tmp_path):
    config = dataclasses.replace(LLAMA, attention_bias=True)
    params = models.params(config)
    models.assert_same(load_target(write_gguf(tmp_path / "m.gguf", config, params)).params, params)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Kind.F16, 2e-3), (Kind.BF16, 2e-2), (Kind.Q8_0, 2e-2), (Kind.Q4_0, 0.4), (Kind.Q4_1, 0.3)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_quantised_weights_are_close_to_what_was_quantised(models, tmp_path, kind, tolerance):
    params = models.params(LLAMA)
    loaded = load_target(write_gguf(tmp_path / "m.gguf", LLAMA, params, kind)).params
    for leaf in table(LLAMA):
        found, expected = np.asarray(param_at(loaded, leaf.path)), np.asarray(param_at(params, leaf.path))
        np.testing.assert_allclose(found, expected, atol=tolerance, err_msg=leaf.path)
    assert np.any(np.asarray(loaded.embedding) != np.asarray(params.embedding))


def q4_k_block(block):
    """One Q4_K super-block, as `dequantize_row_q4_K` of ggml reads it."""
    d, least = (float(x) for x in block[:4].view(np.float16))
    packed, nibbles, out = block[4:16], block[16:], []
    for j in range(8):
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4)
            low = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4)
        part = nibbles[32 * (j // 2) : 32 * (j // 2) + 32]
        values = part >> 4 if j % 2 else part & 15
        out.append(d * float(scale) * values.astype(np.float64) - least * float(low))
    return np.concatenate(out)


def q6_k_block(block):
    """One Q6_K super-block, as `dequantize_row_q6_K` of ggml reads it."""
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    d, out = float(block[208:].view(np.float16)[0]), np.zeros(256)
    for half in range(2):
        for i in range(32):
            bits = high[32 * half + i]
            for quarter in range(4):
                byte = low[64 * half + 32 * (quarter % 2) + i]
                value = (byte >> 4 if quarter > 1 else byte & 15) | (((bits >> (2 * quarter)) & 3) << 4)
                place = 128 * half + 32 * quarter + i
                out[place] = d * float(scales[place // 16]) * (int(value) - 32)
    return out


@pytest.mark.parametrize(
    ("kind", "size", "halves", "block"),
    [(Kind.Q4_K, 144, (0, 1), q4_k_block), (Kind.Q6_K, 210, (104,), q6_k_block)],
    ids=["Q4_K", "Q6_K"],
)
def test_k_quants_are_read_as_ggml_reads_them(models, tmp_path, kind, size, halves, block):
    data = np.random.default_rng(1).integers(0, 256, (24, size), np.uint8)
    for half in halves:
        data[:, 2 * half : 2 * half + 2] = np.array([0.01 * (1 + half)], np.float16).view(np.uint8)
    name = "token_embd.weight"
    file = write_gguf(tmp_path / "m.gguf", LLAMA, models.params(LLAMA), extra=[(name, data, kind)], skip=[name])
    expected = np.stack([block(row) for row in data])
    np.testing.assert_allclose(np.asarray(load_target(file).params.embedding), expected, rtol=1e-4, atol=1e-5)


def test_other_quantisation_is_refused_by_name(models, tmp_path):
    data, name = np.zeros((24, 84), np.uint8), "token_embd.weight"
    file = write_gguf(tmp_path / "m.gguf", LLAMA, models.params(LLAMA), extra=[(name, data, Kind.Q2_K)], skip=[name])
    with pytest.raises(
        CheckpointError, match=r"'token_embd\.weight' in .* is quantised as Q2_K, but it must be one of F32"
    ):
        load_target(file)


def test_llama3_factors_are_recognised(models, tmp_path):
    rope = RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0)
    factors = inverse_wavelengths(RopeConfig(5e5), 64) / inverse_wavelengths(rope, 64)
    params = models.params(LLAMA)
    extra = [("rope_freqs.weight", factors.astype(np.float32), None)]
    assert load_target(write_gguf(tmp_path / "a.gguf", LLAMA, params, extra=extra)).config.rope == rope
    extra = [("rope_freqs.weight", factors.astype(np.float32) ** 0.9, None)]
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight of .* are not those of Llama 3\.1"):
        load_target(write_gguf(tmp_path / "b.gguf", LLAMA, params, extra=extra))


def test_rope_scaling_of_the_metadata_is_read(models, tmp_path):
    params = models.params(BASE)
    metadata = [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
        ("add_rope_scaling_factor", 4.0),
        ("add_rope_scaling_orig_ctx_len", 128),
    ]
    rope = load_target(write_gguf(tmp_path / "a.gguf", BASE, params, metadata=metadata)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 128)
    assert rope.attention_factor == pytest.approx(1.138629436111989)
    metadata = [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)]
    with pytest.raises(CheckpointError, match="'longrope'"):
        load_target(write_gguf(tmp_path / "b.gguf", BASE, params, metadata=metadata))


def test_wrong_files_are_refused(models, tmp_path):
    params = models.params(BASE)
    file = write_gguf(tmp_path / "a.gguf", BASE, params, skip=["blk.0.ffn_up.weight"])
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' .* is missing"):
        load_target(file)
    file = write_gguf(tmp_path / "b.gguf", BASE, params, extra=[("blk.0.oops.weight", np.ones(3, np.float32), None)])
    with pytest.raises(CheckpointError, match=r"'blk\.0\.oops\.weight' .* is no part"):
        load_target(file)
    gguf_file = tmp_path / "c.gguf"
    writer = gguf.GGUFWriter(gguf_file, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'gemma3'.*llama, qwen3, qwen35, qwen35moe, qwen3moe, qwen3next"):
        load_target(gguf_file)
    (tmp_path / "d.gguf").write_bytes(b"no gguf at all")
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        load_target(tmp_path / "d.gguf")
    with pytest.raises(CheckpointError, match="a draft must be"):
        load_draft(gguf_file)


def test_rotating_part_of_a_head_is_refused(models, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", BASE, models.params(BASE), metadata=[("add_rope_dimension_count", 32)])
    with pytest.raises(CheckpointError, match="rotates 32 dimensions"):
        load_target(file)


@pytest.mark.parametrize(
    ("kind", "pre", "message"), [("t5", None, "of kind 't5'"), ("gpt2", "tekken", "'tekken'.*qwen2")]
)
def test_other_tokenizers_are_refused(models, tmp_path, kind, pre, message):
    metadata = [("add_tokenizer_model", kind), ("add_token_list", ["a", "b"])]
    metadata += [("add_tokenizer_pre", pre)] if pre else []
    file = write_gguf(tmp_path / "m.gguf", BASE, models.params(BASE), metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        load_target(file)
