"""The pair in tests/recall-trained is what configs/train-recall.yaml describes, and does what it is for."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.target import lm_head
from dflash_jax.settings import parse, read_settings
from dflash_jax.training import TrainConfig, append_shards
from dflash_jax.training.claims import flatten
from dflash_jax.training.dataset import open_dataset
from dflash_jax.training.features import fingerprint, run_sequences
from dflash_jax.training.inputs import pretrain_settings
from dflash_jax.training.rule import CONTENT, PERIOD, follow_rule, rule_permutation, rule_sequences
from dflash_jax.training.store import run_settings
from tests.pairs import TRAINED, TRAINED_FILES, cases, models

CONFIG = Path(__file__).parents[2] / "configs" / "train-recall.yaml"


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    return parse(TrainConfig, read_settings(CONFIG), str(CONFIG))


@pytest.fixture(scope="module")
def data(config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sequences")
    append_shards(directory, rule_sequences(config.data.rule))
    section = config.data
    sizes = {"max_length": section.max_length, "held_out": section.held_out, "min_answer": section.min_answer}
    return open_dataset(directory, vocab_size=64, **sizes)


def recorded(name: str) -> dict:
    return json.loads((TRAINED_FILES / name).read_text())


def test_the_target_was_made_from_the_config_and_its_data(config, data):
    # A setting that came to exist later is not in the record.
    asked = pretrain_settings(config, data.fingerprint)
    assert recorded("target/pretrain.json").items() <= asked.items()
    assert set(flatten({"pretrain": config.pretrain.model_dump(exclude_unset=True)})) <= set(
        recorded("target/pretrain.json")
    )


def test_the_draft_was_made_from_the_config_for_this_target(config, data):
    of = models(TRAINED)
    facts = {"target fingerprint": fingerprint(of.target, of.target_config), "data fingerprint": data.fingerprint}
    assert recorded("run.json").items() <= {**run_settings(config), **facts}.items()
    given = parse(TrainConfig, config.model_dump(exclude_unset=True), "given")
    assert run_settings(given).keys() == run_settings(config).keys()


def test_the_target_knows_the_rule_on_sequences_it_has_not_seen(config):
    beginnings = np.random.default_rng(99).integers(0, CONTENT, (32, PERIOD))
    tokens = follow_rule(beginnings, config.data.max_length, rule_permutation(config.data.rule.seed))
    of = models(TRAINED)
    logits = lm_head(of.target, run_sequences(of.target, of.target_config, jnp.asarray(tokens)).hidden)
    right = np.argmax(np.asarray(logits), -1)[:, PERIOD:-1] == tokens[:, PERIOD + 1 :]
    assert right.mean() > 0.99


def test_recorded_tokens_are_the_rules_and_recorded_drafts_are_accepted(config):
    permutation = rule_permutation(config.data.rule.seed)
    inside = [case for case in cases(TRAINED) if len(case["prompt"]) + 48 <= config.data.max_length]
    assert len(inside) >= 4
    for case in inside:
        whole = case["prompt"] + case["greedy_tokens"]
        assert whole == follow_rule(np.array([whole[1 : PERIOD + 1]]), len(whole), permutation)[0].tolist()
    rounds = [produced for case in inside for produced in case["produced_per_round"]]
    assert sum(rounds) / len(rounds) >= 4
