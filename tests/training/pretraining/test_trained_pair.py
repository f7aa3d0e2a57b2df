"""The trained pairs in tests are what configs/train-recall*.yaml describe, and do what they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.target import lm_head
from dflash_jax.settings import parse, read_settings
from dflash_jax.training import TrainConfig, append_shards
from dflash_jax.training.data.dataset import open_dataset
from dflash_jax.training.data.features import fingerprint, run_sequences
from dflash_jax.training.manifest import flatten
from dflash_jax.training.pretraining.inputs import pretrain_settings
from dflash_jax.training.pretraining.recall_rule import CONTENT, PERIOD, follow_rule, rule_permutation, rule_sequences
from dflash_jax.training.run.store import run_settings
from tests.pairs import ALL_TRAINED, cases, models, trained_files

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module", params=ALL_TRAINED)
def pair(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def config(pair) -> TrainConfig:
    file = CONFIGS / f"train-{pair.removesuffix('-trained')}.yaml"
    return parse(TrainConfig, read_settings(file), str(file))


@pytest.fixture(scope="module")
def data(config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sequences")
    append_shards(directory, rule_sequences(config.data.rule))
    section = config.data
    sizes = {"max_length": section.max_length, "held_out": section.held_out, "min_answer": section.min_answer}
    return open_dataset(directory, vocab_size=64, **sizes)


def changed(file: Path, settings: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Settings whose value in a record is another, or that the config gives and the record lacks.

    A setting that came to exist later, with a default, is in no record.
    """
    recorded = json.loads(file.read_text())
    given = settings.keys() & flatten(config.model_dump(exclude_unset=True)).keys()
    return {name: settings.get(name) for name in recorded.keys() | given if recorded.get(name) != settings.get(name)}


def test_the_target_was_made_from_the_config_and_its_data(pair, config, data):
    file = trained_files(pair) / "target" / "pretrain.json"
    assert changed(file, pretrain_settings(config, data.fingerprint), config) == {}


def test_the_draft_was_made_from_the_config_for_this_target(pair, config, data):
    of = models(pair)
    dependencies = {
        "target fingerprint": fingerprint(of.target, of.target_config),
        "data fingerprint": data.fingerprint,
        "features in bfloat16": config.data.features is not None,
    }
    assert changed(trained_files(pair) / "run.json", {**run_settings(config), **dependencies}, config) == {}


def test_the_target_knows_the_rule_on_sequences_it_has_not_seen(pair, config):
    beginnings = np.random.default_rng(99).integers(0, CONTENT, (32, PERIOD))
    tokens = follow_rule(beginnings, config.data.max_length, rule_permutation(config.data.rule.seed))
    of = models(pair)
    run = jax.jit(lambda x: lm_head(of.target, run_sequences(of.target, of.target_config, x).hidden))
    logits = run(jnp.asarray(tokens))
    right = np.argmax(np.asarray(logits), -1)[:, PERIOD:-1] == tokens[:, PERIOD + 1 :]
    assert right.mean() > 0.99


def test_recorded_tokens_are_the_rules_and_recorded_drafts_are_accepted(pair, config):
    permutation = rule_permutation(config.data.rule.seed)
    inside = [case for case in cases(pair) if len(case["prompt"]) + 48 <= config.data.max_length]
    assert len(inside) >= 4
    for case in inside:
        whole = case["prompt"] + case["greedy_tokens"]
        assert whole == follow_rule(np.array([whole[1 : PERIOD + 1]]), len(whole), permutation)[0].tolist()
    rounds = [produced for case in inside for produced in case["produced_per_round"]]
    assert sum(rounds) / len(rounds) >= 4
