"""Configs are held against a schema before anything is sized by them: `what it must be` is said with field and file."""

import json
import os
import shutil
import time

import gguf
import pytest

from dflash_jax.checkpoints import describe, load_draft, load_target
from dflash_jax.cli import main
from dflash_jax.errors import DflashError
from tests.checkpoints.test_gguf import BASE, LLAMA, MOE, write_gguf

BIG = 10**9
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def copy(golden, tmp_path):
    def make(name):
        return shutil.copytree(golden / name, tmp_path / name)

    return make


def change(directory, file="config.json", drop=(), **fields):
    path = directory / file
    found = json.loads(path.read_text()) if path.exists() else {}
    found = {name: value for name, value in found.items() if name not in drop}
    path.write_text(json.dumps({**found, **fields}))
    return directory


def refusal(load, path):
    # The processor's time: other tests may run beside this one.
    start = time.process_time()
    with pytest.raises(DflashError) as caught:
        load(path)
    assert time.process_time() - start < 3.0
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600 + 3 * len(str(path))
    return message


def yarn(**more):
    return {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, **more}}


TARGET = [
    ({"num_hidden_layers": BIG}, "num_hidden_layers", "1024 or less"),
    ({"num_hidden_layers": 0}, "num_hidden_layers", "1 or more"),
    ({"vocab_size": BIG}, "vocab_size", "16777216 or less"),
    ({"hidden_size": BIG}, "hidden_size", "1048576 or less"),
    ({"hidden_size": "62"}, "hidden_size", "an integer"),
    ({"hidden_size": 62.5}, "hidden_size", "an integer"),
    ({"hidden_size": True}, "hidden_size", "an integer"),
    ({"hidden_size": 10**400}, "hidden_size", "1048576 or less"),
    ({"intermediate_size": [96]}, "intermediate_size", "an integer"),
    ({"num_attention_heads": 10**6}, "num_attention_heads", "4096 or less"),
    ({"num_attention_heads": 200, "head_dim": None}, "head_dim", "2 or more"),
    ({"num_key_value_heads": 0}, "num_key_value_heads", "1 or more"),
    ({"num_key_value_heads": -2}, "num_key_value_heads", "1 or more"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3", "does not divide"),
    ({"head_dim": "NaN"}, "head_dim", "an integer"),
    ({"head_dim": 32.7}, "head_dim", "an integer"),
    ({"head_dim": float("nan")}, "head_dim", "an integer"),
    ({"head_dim": 0}, "head_dim", "1 or more"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "a finite number"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps", "a finite number"),
    ({"rms_norm_eps": -1}, "rms_norm_eps", "1e-30 or more"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps", "a finite number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps", "a finite number"),
    ({"max_position_embeddings": -1}, "max_position_embeddings", "0 or more"),
    ({"max_position_embeddings": 2**63}, "max_position_embeddings", "2147483647 or less"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
    ({"attention_bias": 0}, "attention_bias", "true or false"),
    ({"hidden_act": None}, "hidden_act", "a string"),
    ({"rope_theta": 0}, "rope_theta", "above 1"),
    ({"rope_theta": 1e300}, "rope_theta", "1e+12 or less"),
    ({"rope_parameters": "default"}, "rope_parameters", "an object"),
    *(({"rope_parameters": value}, "rope_parameters", "an object") for value in (0, False, [], "")),
    *(({"rope_scaling": value}, "rope_scaling", "an object") for value in (0, False, [], "")),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention", "an object"),
    ({"rope_parameters": {"rope_theta": -5}}, "rope_parameters.rope_theta", "above 1"),
    (yarn(original_max_position_embeddings=0), "rope_scaling.original_max_position_embeddings", "1 or more"),
    (yarn(factor=0), "rope_scaling.factor", "1e-06 or more"),
    (yarn(factor=float("nan")), "rope_scaling.factor", "a finite number"),
    (yarn(factor="4"), "rope_scaling.factor", "a finite number"),
    (yarn(attention_factor=-1), "rope_scaling.attention_factor", "1e-06 or more"),
    (yarn(beta_fast="32"), "rope_scaling.beta_fast", "a finite number"),
    (yarn(rope_type=["yarn"]), "rope_scaling.rope_type", "a string"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "low_freq_factor",
        "below high_freq_factor",
    ),
    ({"eos_token_id": [[62]]}, "eos_token_id[0]", "an integer"),
    ({"eos_token_id": [62, None]}, "eos_token_id[1]", "an integer"),
    ({"eos_token_id": "62"}, "eos_token_id[0]", "an integer"),
    ({"eos_token_id": 62.0}, "eos_token_id[0]", "an integer"),
    ({"bos_token_id": "<s>"}, "bos_token_id", "an integer"),
    ({"layer_types": "full_attention"}, "layer_types", "a list"),
    ({"layer_types": ["full_attention", 3, "full_attention", "full_attention"]}, "layer_types[1]", "a string"),
    ({"sliding_window": "16"}, "sliding_window", "an integer"),
    ({"use_sliding_window": "no"}, "use_sliding_window", "true or false"),
    ({"architectures": "Qwen3ForCausalLM"}, "architectures", "a list"),
    ({"architectures": [["Qwen3ForCausalLM"]]}, "architectures[0]", "a string"),
    ({"text_config": 3}, "text_config", "an object"),
]


@pytest.mark.parametrize(("fields", "field", "right"), TARGET, ids=[f"{next(iter(f))}-{w}" for f, _, w in TARGET])
@pytest.mark.parametrize("load", [load_target, describe], ids=["load", "describe"])
def test_target_config_out_of_its_schema_is_refused(copy, load, fields, field, right):
    directory = change(copy("recall-target"), **fields)
    message = refusal(load, directory)
    for part in (field, str(directory / "config.json"), right):
        assert part in message


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"num_experts": BIG, "num_local_experts": None}, "4096 or less"),
        ({"num_local_experts": BIG}, "4096 or less"),
        ({"num_experts_per_tok": 0}, "from 1 to"),
        ({"num_experts_per_tok": 9}, "from 1 to the number of experts"),
        ({"moe_intermediate_size": "12"}, "an integer"),
        ({"decoder_sparse_step": 0}, "1 or more"),
        ({"mlp_only_layers": [None]}, "an integer"),
        ({"norm_topk_prob": "yes"}, "true or false"),
    ],
    ids=str,
)
def test_experts_out_of_their_schema_are_refused(copy, fields, right):
    directory = change(copy("tiny-qwen3-moe"), **fields)
    message = refusal(load_target, directory)
    for part in (next(iter(fields)), str(directory / "config.json"), right):
        assert part in message


DRAFT = [
    ({"mask_token_id": "x"}, "an integer"),
    ({"mask_token_id": -1}, "0 or more"),
    ({"block_size": "x"}, "an integer"),
    ({"block_size": 1}, "2 or more"),
    ({"block_size": BIG}, "4096 or less"),
    ({"target_layer_ids": [None]}, "an integer"),
    ({"target_layer_ids": 3}, "a list"),
    ({"target_layer_ids": [-1]}, "0 or more"),
    ({"target_layer_ids": [BIG]}, "below 1024"),
    ({"target_layer_ids": [0] * 2000}, "at most 1024"),
    ({"conv_kernel_size": BIG}, "4096 or less"),
    ({"conv_group_size": 0}, "1 or more"),
    ({"selector_rank": 0.5}, "an integer"),
    ({"selector_top_k": "16"}, "an integer"),
    ({"input_embedding_scale": "1"}, "a finite number"),
    ({"output_multiplier": float("nan")}, "a finite number"),
    ({"output_multiplier": 0}, "above 0"),
    ({"final_logit_softcapping": -3}, "0 or more"),
    ({"is_causal": "no"}, "true or false"),
]


@pytest.mark.parametrize(("fields", "right"), DRAFT, ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["in dflash_config", "at the top level"])
def test_draft_config_out_of_its_schema_is_refused(copy, fields, right, nested):
    directory = copy("recall-dflash2")
    (name,) = fields
    own = json.loads((directory / "config.json").read_text())["dflash_config"]
    if nested:
        change(directory, dflash_config={**own, **fields})
    else:
        change(directory, dflash_config={key: value for key, value in own.items() if key != name}, **fields)
    message = refusal(load_draft, directory)
    for part in (f"dflash_config.{name}" if nested else name, str(directory / "config.json"), right):
        assert part in message


@pytest.mark.parametrize(
    "fields",
    [{"dflash_config": [3]}, {"num_target_layers": "6"}, {"num_target_layers": BIG}, {"num_hidden_layers": BIG}],
    ids=str,
)
def test_the_rest_of_a_draft_config_out_of_its_schema_is_refused(copy, fields):
    directory = change(copy("recall-dflash1"), **fields)
    message = refusal(load_draft, directory)
    assert next(iter(fields)) in message
    assert str(directory / "config.json") in message


def test_generation_config_out_of_its_schema_is_refused(copy):
    directory = change(copy("recall-target"), "generation_config.json", eos_token_id=[[62]])
    message = refusal(load_target, directory)
    assert "eos_token_id[0]" in message
    assert "generation_config.json" in message


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"eos_token": 3}, "a string, or an object"),
        ({"bos_token": {"content": None}}, "a string, or an object"),
        ({"chat_template": 5}, "a list of named templates"),
        ({"chat_template": [{"name": "default"}]}, "'name' and 'template'"),
        ({"add_bos_token": "no"}, "true or false"),
        ({"tokenizer_class": ["x"]}, "a string"),
    ],
    ids=str,
)
def test_tokenizer_config_out_of_its_schema_is_refused(copy, fields, right):
    directory = change(copy("recall-target"), "tokenizer_config.json", **fields)
    message = refusal(load_target, directory)
    for part in (next(iter(fields)), str(directory / "tokenizer_config.json"), right):
        assert part in message


def test_integers_are_numbers_and_null_is_the_default(copy):
    directory = copy("recall-target")
    plain = load_target(directory).config
    fields = {"rope_parameters": {"rope_theta": 10_000}, "num_key_value_heads": 2, "use_sliding_window": None}
    assert load_target(change(directory, **fields, attention_bias=None, tie_word_embeddings=None)).config == plain


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (f'{{"x": {DEEP}}}', "nested too deep"),
        (DEEP, "nested too deep"),
        ('{"hidden_size": ' + "1" * 5000 + "}", "not valid JSON (Exceeds the limit"),
        ('{"eos_token_id": 1, "eos_token_id": 2}', "the key 'eos_token_id' is given twice"),
        ("[1, 2]", "JSON object"),
        ('"' + "x" * 5_000_000 + '"', "JSON object"),
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_object_is_refused(copy, file, content, reason):
    directory = copy("recall-target")
    (directory / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(load_target, directory)
    assert str(directory / file) in message
    assert reason in message


def test_a_config_that_is_no_regular_file_is_refused(copy, tmp_path):
    directory = copy("recall-target")
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    assert "not a regular file" in refusal(load_target, directory)
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("/dev/zero")
    assert "not a regular file" in refusal(load_target, directory)
    (directory / "config.json").unlink()
    with (directory / "config.json").open("wb") as file:
        file.truncate(10 * 2**30)
    assert "bytes" in refusal(load_target, directory)


def test_millions_of_experts_cost_no_more_than_the_file_has(copy):
    directory = change(copy("tiny-qwen3-moe"), num_experts=4096, num_local_experts=4096, drop=("mlp_only_layers",))
    assert "config" in refusal(load_target, change(directory, num_hidden_layers=1024))


def overwritten(file, models, config, **values):
    """A GGUF file of a config with some metadata replaced."""
    original = gguf.GGUFWriter.add_key_value

    def add(writer, key, value, kind, *args, **kwargs):
        if key in values:
            value = values.pop(key)
            kind = gguf.GGUFValueType.get_type(value) if not isinstance(value, int) else gguf.GGUFValueType.UINT32
        return original(writer, key, value, kind, *args, **kwargs)

    gguf.GGUFWriter.add_key_value = add
    try:
        return write_gguf(file, config, models.params(config))
    finally:
        gguf.GGUFWriter.add_key_value = original


GGUF = [
    (BASE, "qwen3.block_count", BIG, "1024 or less"),
    (BASE, "qwen3.block_count", 0, "1 or more"),
    (BASE, "qwen3.attention.head_count", 0, "1 or more"),
    (BASE, "qwen3.attention.head_count_kv", 0, "1 or more"),
    (BASE, "qwen3.attention.head_count_kv", 3, "does not divide"),
    (BASE, "qwen3.attention.key_length", 0, "1 or more"),
    (BASE, "qwen3.attention.key_length", 10**6, "4096 or less"),
    (BASE, "qwen3.attention.layer_norm_rms_epsilon", float("nan"), "a finite number"),
    (BASE, "qwen3.attention.layer_norm_rms_epsilon", -1.0, "1e-30 or more"),
    (BASE, "qwen3.embedding_length", "256", "an integer"),
    (BASE, "qwen3.embedding_length", BIG, "1048576 or less"),
    (BASE, "qwen3.feed_forward_length", [256], "differs from layer to layer"),
    (BASE, "qwen3.context_length", 2**32 - 1, "2147483647 or less"),
    (BASE, "qwen3.rope.freq_base", 0.0, "above 1"),
    (LLAMA, "llama.rope.freq_base", float("inf"), "a finite number"),
    (MOE, "qwen3moe.expert_count", BIG, "4096 or less"),
    (MOE, "qwen3moe.expert_used_count", 9, "from 1 to the number of experts"),
    (MOE, "qwen3moe.expert_feed_forward_length", 0, "1 or more"),
]


@pytest.mark.parametrize(("config", "key", "value", "right"), GGUF, ids=[f"{k}={v}" for _, k, v, _ in GGUF])
def test_gguf_metadata_out_of_its_schema_is_refused(models, tmp_path, config, key, value, right):
    file = overwritten(tmp_path / "m.gguf", models, config, **{key: value})
    message = refusal(load_target, file)
    for part in (str(file), right):
        assert part in message
    # Sizes that contradict each other are named as config.json has them.
    if "divide" not in right and "from 1 to" not in right:
        assert key in message


def test_the_command_line_ends_with_2_and_one_sentence(copy, capsys, monkeypatch):
    directory = change(copy("recall-target"), num_hidden_layers=BIG)
    monkeypatch.setattr("sys.argv", ["dflash-jax", "inspect", str(directory)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "num_hidden_layers" in capsys.readouterr().err
