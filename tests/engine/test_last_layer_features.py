"""Features of the target's last layer are transformers' `hidden_states[-1]`: the state after the final norm."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import ConfigError, Engine, EngineConfig
from dflash_jax.checkpoints import load_target
from dflash_jax.engine import Models
from dflash_jax.models.draft import context_entries
from dflash_jax.models.matrix import Matrix
from dflash_jax.models.target import lm_head
from dflash_jax.training.data.feature_cache import CachedFeatures
from dflash_jax.training.data.features import FeatureExtractor, run_sequences
from tests.pairs import GOLDEN, PAIRS, SAMPLING, SIZES, cases, models, tensors
from tests.training.data.test_feature_cache import opened
from tests.training.recall import write_data

PAIR = PAIRS[0]
TOLERANCE = 2e-4
LAYERS = (1, 3)


def listening_to_the_last_layer(pair: str) -> Models:
    """A pair whose draft listens to layers 1 and 3 of 4, with the weights it has for two of its layers."""
    of = models(pair)
    hidden = of.draft_config.hidden_size
    config = dataclasses.replace(of.draft_config, target_layer_ids=LAYERS)
    return of.replace(draft=of.draft.replace(fc=Matrix(of.draft.fc.value[: 2 * hidden])), draft_config=config)


def reference_features(of: Models, tokens: list[int]):
    """What the authors' package gives the draft: `hidden_states[id + 1]`, the last of which is normalised."""
    run = run_sequences(of.target, of.target_config, jnp.asarray([tokens]), (LAYERS[0],))
    return jnp.concatenate([run.features, run.hidden], axis=-1)


def test_the_last_layers_feature_is_the_input_of_the_logits():
    of, case = models(None), cases(PAIR)[0]
    last = of.target_config.num_layers - 1
    run = run_sequences(of.target, of.target_config, jnp.asarray([case["prompt"]]), (last, 0, last))
    first, between, again = jnp.split(run.features, 3, axis=-1)
    np.testing.assert_array_equal(first, run.hidden)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(lm_head(of.target, first)[0], tensors(PAIR)["0.prompt_logits"], atol=TOLERANCE, rtol=0)
    wanted = run_sequences(of.target, of.target_config, jnp.asarray([case["prompt"]]), (0,)).features
    np.testing.assert_array_equal(between, wanted)


def test_training_reads_the_same_feature():
    target, case = load_target(GOLDEN / "recall-target"), cases(PAIR)[0]
    features = FeatureExtractor(target.params, target.config)(np.asarray(case["prompt"]), (3,))
    logits = lm_head(target.params, jnp.asarray(features))
    np.testing.assert_allclose(logits, tensors(PAIR)["0.prompt_logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pair", PAIRS)
def test_an_engine_writes_and_drafts_from_the_features_of_the_authors_package(pair):
    of, case = listening_to_the_last_layer(pair), cases(pair)[0]
    served = Engine(of, EngineConfig(**SIZES, prefix_cache=False))
    served.add_request(case["prompt"], SAMPLING, request_id="a")
    while served.slot_of("a") is None or not bool(served.state.slots.decoding[served.slot_of("a")]):
        served.step()
    slot, count = served.slot_of("a"), len(case["prompt"])
    table = np.asarray(served.state.slots.block_table[slot])
    pages = served.state.draft_pages
    features = reference_features(of, case["prompt"])
    wanted = context_entries(of.draft, of.draft_config, features, jnp.arange(count)[None])
    for found, entries in ((pages.k, wanted.k), (pages.v, wanted.v)):
        written = np.asarray(found)[:, table[: -(-count // 16)]].reshape(len(found), -1, *found.shape[3:])
        np.testing.assert_allclose(written[:, :count], np.asarray(entries)[:, 0], atol=TOLERANCE, rtol=1e-4)


def test_features_cached_before_the_norm_are_not_mixed_in(tmp_path):
    data, target = opened(write_data(tmp_path / "data", seed=0)), load_target(GOLDEN / "recall-target")

    def cache():
        extractor = FeatureExtractor(target.params, target.config)
        directory = tmp_path / "features"
        return CachedFeatures(
            data, extractor, (3,), directory=directory, target="a", dtype="float32", hidden=128, limit_gb=1
        )

    cache()
    claim = tmp_path / "features" / "target.json"
    claim.write_text('{"target": "a", "dtype": "float32"}')
    with pytest.raises(ConfigError, match=r"states was None and is 'hidden_states\[layer \+ 1\]'"):
        cache()
