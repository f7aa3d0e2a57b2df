"""Values that are not what they look like, in every key of the training configs: one sentence with file and key."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from dflash_jax.errors import ConfigError
from dflash_jax.settings import parse
from dflash_jax.training import TrainConfig, train
from dflash_jax.training.corpora.config import CorpusConfig
from tests.training import recall

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 62,
    "bos_token_id": 60,
}
UPDATE = {
    "kind": "adamw",
    "steps": 10,
    "sequences": 4,
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup": 0.1,
    "final": 0.0,
    "clip": 1.0,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
}
TRAIN = {
    "target": "there",
    "pretrain": {"shape": SHAPE, "optimiser": UPDATE, "scale": 0.5},
    "output": "here",
    "seed": 0,
    "dtype": "float32",
    "log_every": 10,
    "draft": {
        "num_layers": 2,
        "block_size": 8,
        "mask_token_id": 63,
        "target_layer_ids": [0, 1],
        "version": 2,
        "conv_taps": 2,
        "conv_group_size": 16,
        "selector_rank": 64,
        "selector_top_k": 8,
        "windows": [None, 16],
        "causal": False,
        "intermediate_size": 64,
    },
    "init": {
        "fc": "scaled",
        "layers": "random",
        "second_tap": 0.5,
        "scale": 0.5,
        "norm": 1.0,
        "feature_sequences": 16,
    },
    "data": {
        "path": "sequences",
        "rule": {"sequences": 64, "length": 96, "seed": 0},
        "max_length": 96,
        "held_out": 0.1,
        "min_answer": 2,
        "features": "features",
        "features_gb": 20.0,
    },
    "loss": {"gamma": 4.0, "selector_weight": 1.0, "soft": 0.5, "unseen": True, "frequent": 30, "drawn": 10},
    "optimiser": {**UPDATE, "accumulate": 2, "anchors": 8},
    "checkpoint": {"every": 100, "keep": 2},
    "evaluation": {
        "every": 100,
        "sequences": 4,
        "anchors": 8,
        "engine_every": 100,
        "engine_prompts": 4,
        "engine_tokens": 16,
    },
}
CORPUS = {
    "dtype": "float32",
    "output": "corpus.jsonl",
    "conversations": 10,
    "instructions": "instructions.txt",
    "source_corpora": ["a.jsonl"],
    "question_temperature": 1.0,
    "question_min_p": 0.05,
    "question_tokens": 64,
    "answer_temperatures": [0.0, 0.5],
    "answer_tokens": 64,
    "seed": 0,
}
NUMBERS = [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), True, [], {}, {"a": 1}, "", "no"]
HOSTILE = {
    bool: ["no", "true", 0, 1, 1.0, []],
    int: [*NUMBERS, "62", 62.5, 62.0, -1, 2**32, 2**63],
    float: [*NUMBERS, "0.5", 1e300, -1e300],
    str: ["", "\0", "\ud800", 3, 1.5, True, float("nan"), [], ["a"], {}],
    list: ["12", 3, True, {"a": 1}, [[1]], [True], ["\0"], [10**400], [float("nan")]],
}


def keys(values, *above):
    """The way to each value that is no mapping."""
    for key, value in values.items():
        yield from keys(value, *above, key) if isinstance(value, dict) else [(*above, key)]


def changed(values, way, value):
    values = copy.deepcopy(values)
    section = values
    for key in way[:-1]:
        section = section[key]
    section[way[-1]] = value
    return values


def at(values, way):
    for key in way:
        values = values[key]
    return values


CASES = [
    *((TrainConfig, TRAIN, way) for way in keys(TRAIN)),
    *((CorpusConfig, {"target": {"path": "there"}, **CORPUS}, way) for way in keys(CORPUS)),
]


@pytest.mark.parametrize(("model", "values", "way"), CASES, ids=[".".join(way) for _, _, way in CASES])
def test_a_hostile_value_is_refused_by_file_and_key(model, values, way):
    parse(model, values, "run.yaml")
    key = ".".join(way)
    for hostile in HOSTILE[type(at(values, way))]:
        with pytest.raises(ConfigError) as caught:
            parse(model, changed(values, way, hostile), "run.yaml")
        said = str(caught.value)
        assert said.startswith("run.yaml: ") and key in said, said
        assert "\n" not in said and len(said) < 500


@pytest.mark.parametrize("section", [".".join(way) for way in (("draft",), ("data",), ("loss",), ("optimiser",))])
@pytest.mark.parametrize("value", [3, "x", [], True, float("nan")])
def test_a_section_that_is_no_mapping_is_refused(section, value):
    with pytest.raises(ConfigError, match=rf"run\.yaml: '{section}' is .*must be a mapping"):
        parse(TrainConfig, {**TRAIN, section: value}, "run.yaml")


def test_more_tokens_of_the_rule_than_fit_are_refused():
    values = changed(TRAIN, ("data", "rule"), {"sequences": 2**20, "length": 2**20})
    with pytest.raises(ConfigError, match=r"run\.yaml: data\.rule: 1048576 .* are 1,099,511,627,776 tokens"):
        parse(TrainConfig, values, "run.yaml")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimiser__sequences": 2**20}, r"optimiser\.sequences 1048576 of data\.max_length 64 are 67,108,864 tokens"),
        ({"draft__intermediate_size": 2**20, "draft__num_layers": 64}, r"the draft has [\d,]+ weights"),
        ({"pretrain": {"shape": {**SHAPE, "intermediate_size": 2**20, "hidden_size": 2**13}}}, "pretrain.shape has"),
    ],
)
def test_sizes_that_are_too_much_together_are_refused_before_memory_is_taken(tmp_path, recall_data, changes, says):
    if "pretrain" in changes:
        changes["pretrain"]["optimiser"] = UPDATE
        changes["target"] = str(tmp_path / "target")
    with pytest.raises(ConfigError, match=says) as caught:
        train(recall.config(tmp_path, recall_data, **changes))
    assert "\n" not in str(caught.value)


def test_hostile_values_end_the_command_line_with_one_sentence(tmp_path, capsys, monkeypatch):
    from dflash_jax.cli import main

    path = Path(tmp_path / "run.yaml")
    path.write_text(yaml.safe_dump(changed(TRAIN, ("optimiser", "steps"), 10**40)))
    monkeypatch.setattr("sys.argv", ["dflash-jax", "train", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "'optimiser.steps' is <integer of 133 bits>" in said and str(path) in said and len(said) < 700
