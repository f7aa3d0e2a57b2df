"""Training for hybrid targets: their features, fresh ones, and fresh drafts for them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import load_target, save_target
from dflash_jax.errors import ConfigError
from dflash_jax.training.config import (
    DraftSection,
    GatedDeltaShape,
    InitSection,
    PretrainSection,
    RuleSection,
    TargetShape,
    UpdateSection,
)
from dflash_jax.training.data.batch import TokenBatch
from dflash_jax.training.data.dataset import open_dataset
from dflash_jax.training.data.features import FeatureExtractor, run_sequences
from dflash_jax.training.data.records import append_shards
from dflash_jax.training.drafts.init import fresh_params
from dflash_jax.training.drafts.start import fresh_config
from dflash_jax.training.pretraining.recall_rule import rule_sequences
from dflash_jax.training.pretraining.target import fresh_target_config, fresh_target_params, predict, pretrain
from tests.pairs import GOLDEN, tensors

DELTA = GatedDeltaShape(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    full_attention_interval=2,
)
SHAPE = TargetShape(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    gated_delta=DELTA,
)


@pytest.fixture(scope="module")
def hybrid():
    return load_target(GOLDEN / "recall-hybrid-target")


def test_features_of_a_hybrid_are_the_references(hybrid):
    extract = FeatureExtractor(hybrid.params, hybrid.config)
    cases = json.loads((GOLDEN / "recall-hybrid-dflash2.json").read_text())["cases"]
    for index, case in enumerate(cases):
        found = extract(np.asarray(case["prompt"]), (0, 1, 2))
        golden = tensors("recall-hybrid-dflash2")[f"{index}.prompt_features"]
        np.testing.assert_allclose(found, golden, atol=2e-4, rtol=0)


def test_features_of_a_hybrid_do_not_depend_on_its_neighbours(hybrid):
    tokens = np.random.default_rng(0).integers(0, 56, (3, 40)).astype(np.int32)
    run = jax.jit(run_sequences, static_argnums=(1, 3))
    together = run(hybrid.params, hybrid.config, jnp.asarray(tokens), (0, 2)).features
    for row in range(3):
        alone = run(hybrid.params, hybrid.config, jnp.asarray(tokens[row : row + 1]), (0, 2)).features
        np.testing.assert_allclose(together[row], alone[0], atol=2e-5, rtol=0)


def test_a_fresh_hybrid_is_one_that_is_saved_and_loaded(tmp_path):
    config = fresh_target_config(SHAPE)
    assert (config.family, config.attention_layers, config.gated_delta_layers) == ("qwen3_5", (1,), (0,))
    params = fresh_target_params(jax.random.key(0), config, 0.5)
    loaded = load_target(save_target(tmp_path / "t", config, params))
    assert loaded.config == config
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_of_a_fresh_hybrid_reach_every_weight():
    config = fresh_target_config(SHAPE)
    params = fresh_target_params(jax.random.key(1), config, 0.5)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 24)), jnp.int32)
    batch = TokenBatch(tokens, jnp.array([5, 9]), jnp.array([24, 20]))
    gradient = jax.jit(jax.grad(lambda params: predict(params, config, batch).nll))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        assert np.abs(leaf).max() > 0, name


def test_a_hybrid_target_learns_what_it_is_shown(tmp_path):
    append_shards(tmp_path, rule_sequences(RuleSection(sequences=32, length=24)))
    data = open_dataset(tmp_path, vocab_size=64, max_length=24, held_out=0.0, min_answer=2)
    optimiser = UpdateSection(steps=20, sequences=16, learning_rate=1e-2)
    learnt = pretrain(PretrainSection(shape=SHAPE, optimiser=optimiser), data, seed=0)
    # One that had learnt nothing would be at log 64.
    assert learnt.loss < 3, learnt.loss


def test_a_fresh_draft_for_a_hybrid_turns_whole_heads_and_has_attention_only(hybrid):
    section = DraftSection(num_layers=2, mask_token_id=63, target_layer_ids=(0, 1, 2), selector_rank=8)
    config = fresh_config(section, hybrid.config)
    assert config.rope.partial == 1.0
    assert not (config.attention_gate or config.zero_centred_norms or config.gated_delta_layers)
    drawn = fresh_params(jax.random.key(0), config, InitSection(), hybrid.params, hybrid.config)
    assert len(drawn.layers) == 2
    copied = InitSection(layers="target")
    with pytest.raises(ConfigError, match=r"init\.layers is 'target', but the target has Gated DeltaNet layers"):
        fresh_params(jax.random.key(0), config, copied, hybrid.params, hybrid.config)
