"""Whatever stands in the files of a checkpoint, reading it ends in a config that can be run or in one sentence.

`HYPOTHESIS_PROFILE=thorough` tries 2,000 of each.
"""

import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from dflash_jax.checkpoints import describe
from dflash_jax.checkpoints.gguf_config import check_metadata, gguf_fields, gguf_target_config
from dflash_jax.checkpoints.gguf_tokenizer import read_tokenizer
from dflash_jax.checkpoints.hf_config import config_fields, draft_config, target_config
from dflash_jax.checkpoints.load import read_target_config
from dflash_jax.errors import DflashError
from dflash_jax.families.leaf import StoredTensor
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.layers import inverse_wavelengths

GOLDEN = Path(__file__).parents[1] / "golden"
TARGETS = ("recall-target", "tiny-llama-rope3-tied", "tiny-qwen3-moe")
DRAFTS = ("recall-dflash1", "recall-dflash2", "recall-dflash2-swa")
SECONDS, MEGABYTES = 5.0, 400

_LOOSE = settings(suppress_health_check=list(HealthCheck))


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


# Values that somebody's converter, editor or malice has put into a config.
HOSTILE = st.one_of(
    st.sampled_from([None, True, False, "", "62", "NaN", "no", "x" * 10_000, "\x00", "\ud800", "full_attention"]),
    st.sampled_from([0, 1, -1, 2, 3, 7, 62, 64, 128, 10**9, 2**31, 2**63, -(2**63), 10**400, 62.0, 62.5]),
    st.sampled_from(
        [0.0, -1.0, 1e-320, 5e-324, 1e-9, 1 + 1e-15, 1e39, 1e308, float("nan"), float("inf"), -float("inf")]
    ),
    st.sampled_from([[], {}, [[62]], [None], {"a": None}, [0] * 5000, ["sliding_attention"] * 4, [1, 3], nested(200)]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 70), max_size=6),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Fields that no golden config has.
FURTHER = {
    "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.0, "truncate": True},
    "rope_parameters": {**LLAMA3, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10_000.0,
    "mlp_only_layers": [1],
    "num_experts": 4,
    "num_local_experts": 4,
    "decoder_sparse_step": 1,
    "is_causal": False,
    "num_target_layers": 4,
    "target_layer_ids": [1, 3],
    "block_size": 8,
    "quantization_config": {"quant_method": "fp8"},
    "text_config": {"vocab_size": 64, "num_hidden_layers": 4},
    "mlp_bias": False,
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["full_attention"] * 4,
}


@st.composite
def changed(draw, fields):
    """Fields of which one to four were set, dropped or changed inside."""
    fields = dict(fields)
    names = sorted({*fields, *FURTHER})
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=4)):
        inner = fields.get(name, FURTHER.get(name))
        how = draw(st.sampled_from(["set", "drop", "inside", "further"]))
        if how == "drop":
            fields.pop(name, None)
        elif how == "inside" and isinstance(inner, dict) and inner:
            fields[name] = {**inner, draw(st.sampled_from(sorted(inner))): draw(HOSTILE)}
        elif how == "further" and name in FURTHER:
            fields[name] = FURTHER[name]
        else:
            fields[name] = draw(HOSTILE)
    return fields


@pytest.fixture(scope="module")
def memory():
    """The most memory this process has had, in MB, before the first example."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def read(memory, function, *args):
    """What reading gives, None if it was refused; anything but a sentence in bounded time and memory fails."""
    start = time.process_time()
    try:
        found = function(*args)
    except DflashError as error:
        found, message = None, str(error)
        assert "\n" not in message
        assert len(message) < 1000
        assert "Traceback" not in message
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - memory < MEGABYTES
    event("refused" if found is None else "read")
    return found


def can_be_run(config):
    """What the models take for granted."""
    wavelengths = inverse_wavelengths(config.rope, config.head_dim)
    assert np.all(np.isfinite(wavelengths))
    assert np.all(wavelengths >= 0)
    assert np.isfinite(np.float32(config.rope.attention_factor))
    assert 0 < np.float32(config.rms_norm_eps) <= 1
    assert config.num_heads % config.num_kv_heads == 0
    assert type(config.head_dim) is int
    assert all(type(layer.window) is int or layer.window is None for layer in config.layers)
    if isinstance(config, TargetConfig):
        assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
        assert type(config.max_position) is int
        assert all(layer.moe.experts_per_token <= layer.moe.num_experts for layer in config.layers if layer.moe)
    else:
        assert all(type(index) is int for index in config.target_layer_ids)
        assert 0 <= config.mask_token_id < 2**31
        assert np.isfinite(np.float32(config.output_multiplier * config.input_embedding_scale))


def fields_of(name, file="config.json"):
    return json.loads((GOLDEN / name / file).read_text())


@_LOOSE
@given(data=st.data(), name=st.sampled_from(TARGETS))
def test_any_target_config_is_read_or_refused(memory, data, name):
    fields = data.draw(changed(fields_of(name)))
    generation = data.draw(st.none() | st.fixed_dictionaries({"eos_token_id": HOSTILE}))
    config = read(memory, target_config, fields, generation, "here/config.json")
    if config is not None:
        can_be_run(config)
        json.dumps(config_fields(config))


@_LOOSE
@given(data=st.data(), name=st.sampled_from(DRAFTS))
def test_any_draft_config_is_read_or_refused(memory, data, name):
    fields = data.draw(changed(fields_of(name)))
    config = read(memory, draft_config, fields, None, "here/config.json")
    if config is not None:
        can_be_run(config)
        assert isinstance(config, DraftConfig)


@_LOOSE
@given(data=st.data(), scaling=st.sampled_from([YARN, LLAMA3, FURTHER["rope_scaling"]]))
def test_any_scaling_of_the_users_is_taken_or_refused(memory, data, scaling):
    scaling = {**scaling, data.draw(st.sampled_from(sorted(scaling))): data.draw(HOSTILE)}
    config = read(memory, lambda: target_config(fields_of("recall-target"), rope_scaling=scaling))
    if config is not None:
        can_be_run(config)


# JSON as it should not be.
BROKEN = st.one_of(
    st.just("[" * 100_000 + "]" * 100_000),
    st.just('{"a":' * 100_000 + "1" + "}" * 100_000),
    st.just('{"vocab_size": ' + "9" * 5000 + "}"),
    st.just('{"vocab_size": 64, "vocab_size": 65}'),
    st.just('{"rms_norm_eps": NaN, "rope_theta": -Infinity}'),
    st.just("\ufeff{}"),
    st.text(max_size=40),
    st.builds(
        lambda text, at, junk: text[:at] + junk + text[at:], st.just("{}"), st.integers(0, 2), st.text(max_size=5)
    ),
)


@_LOOSE
@given(data=st.data(), name=st.sampled_from((*TARGETS, *DRAFTS)))
def test_any_text_in_the_files_of_a_directory_is_read_or_refused(memory, data, name):
    with tempfile.TemporaryDirectory() as scratch:
        directory = shutil.copytree(GOLDEN / name, Path(scratch) / "m", copy_function=os.symlink)
        file = data.draw(st.sampled_from(["config.json", "generation_config.json"]))
        text = (GOLDEN / name / "config.json").read_text()
        at = data.draw(st.integers(0, len(text)))
        cut = text[:at] + data.draw(st.sampled_from(["", '"', "{", "1e999", "\x00", "null,"])) + text[at + 1 :]
        content = data.draw(st.one_of(BROKEN, st.just(cut)))
        (directory / file).unlink(missing_ok=True)
        (directory / file).write_text(content, encoding="utf-8", errors="surrogatepass")
        read(memory, read_target_config if name in TARGETS else describe, directory)


WEIGHT_MAP = st.dictionaries(
    st.sampled_from(["lm_head.weight", "model.norm.weight", "../x", ""]),
    st.one_of(HOSTILE, st.sampled_from(["model-1.safetensors", "../m/model-1.safetensors", "/dev/zero", "."])),
    max_size=3,
)


@_LOOSE
@given(index=st.one_of(HOSTILE, st.fixed_dictionaries({"weight_map": st.one_of(HOSTILE, WEIGHT_MAP)})))
def test_any_index_of_shards_is_read_or_refused(memory, index):
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        shutil.copy(GOLDEN / "recall-target" / "config.json", directory)
        os.symlink(GOLDEN / "recall-target" / "model.safetensors", directory / "model-1.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        read(memory, describe, directory)


def metadata_of(kind):
    prefix = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 16,
        "rope.freq_base": 1e4,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": 1.0,
        "vocab_size": 24,
        "expert_count": 3,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
    }
    tokenizer = {
        "model": "llama",
        "pre": "default",
        "tokens": ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"t{index}" for index in range(20))],
        "scores": [0.0] * 24,
        "token_type": [2, 3, 3, 3] + [1] * 20,
        "add_bos_token": True,
        "add_space_prefix": False,
        **{f"{name}_token_id": index for index, name in enumerate(["unknown", "bos", "eos", "eot", "eom", "padding"])},
    }
    return {
        "general.architecture": kind,
        **{f"{kind}.{key}": value for key, value in prefix.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        "tokenizer.chat_template": "{{ messages }}",
    }


def read_gguf(metadata, tensors):
    file = Path("m.gguf")
    metadata = check_metadata(metadata, file)
    config = gguf_target_config(metadata, tensors, file)
    assert gguf_fields(metadata, tensors, file)["architectures"]
    return config, read_tokenizer(metadata, file)


@_LOOSE
@given(data=st.data(), kind=st.sampled_from(["qwen3", "llama", "qwen3moe"]))
def test_any_gguf_metadata_is_read_or_refused(memory, data, kind):
    metadata = metadata_of(kind)
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=4)):
        if data.draw(st.booleans()):
            # GGUF has no null.
            metadata[key] = data.draw(HOSTILE.filter(lambda value: value is not None))
        else:
            del metadata[key]
            break
    shape = data.draw(st.sampled_from([(24, 64), (0, 64), (24,)]))
    embedding = StoredTensor("token_embd.weight", Path("m.gguf"), shape, "F32", lambda slices: np.zeros(shape))
    found = read(memory, read_gguf, metadata, {"token_embd.weight": embedding})
    if found is not None:
        can_be_run(found[0])


def test_the_metadata_that_is_fuzzed_is_read_when_whole():
    for kind in ("qwen3", "llama", "qwen3moe"):
        config, tokenizer = read_gguf(metadata_of(kind), {})
        assert config.num_layers == 2
        assert tokenizer is not None
        assert gguf.Keys.General.ARCHITECTURE in metadata_of(kind)
