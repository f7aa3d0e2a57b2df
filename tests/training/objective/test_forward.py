"""Training sees what serving sees: the same hidden states, and nothing from the anchor on but its token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.models.draft import context_entries, run_block
from dflash_jax.training.data.features import run_sequences
from dflash_jax.training.objective.forward import block_hidden
from tests.pairs import PAIRS, models
from tests.training.recall import sequences

LENGTH = 160
jitted_block_hidden = jax.jit(block_hidden, static_argnums=1)
jitted_run_block = jax.jit(run_block, static_argnums=(1, 5), static_argnames="implementation")
ANCHORS = jnp.array([[1, 20, 64, 127, 128, 152], [2, 3, 31, 90, 129, 140]], jnp.int32)


def tokens_and_features(pair: str):
    of = models(pair)
    tokens = jnp.asarray(np.stack([sequence.tokens for sequence in sequences(2, LENGTH, seed=3)]))
    run = jax.jit(run_sequences, static_argnums=(1, 3))
    return tokens, run(of.target, of.target_config, tokens, of.feature_layers).features


def hidden_states(pair: str, features, tokens, anchors=ANCHORS):
    of = models(pair)
    anchor_tokens = jnp.take_along_axis(tokens, anchors, 1)
    return jitted_block_hidden(of.draft, of.draft_config, of.target.embedding, features, anchors, anchor_tokens)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_block_has_the_hidden_states_of_serving(pair):
    of = models(pair)
    tokens, features = tokens_and_features(pair)
    trained = hidden_states(pair, features, tokens)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    entries = context_entries(of.draft, of.draft_config, features, positions)
    for row in range(2):
        paged = [x[:, row].reshape(x.shape[0], LENGTH // 16, 16, *x.shape[3:]) for x in (entries.k, entries.v)]
        count = ANCHORS.shape[1]
        context = Context(
            KeyValues(*paged),
            block_table=jnp.broadcast_to(jnp.arange(LENGTH // 16, dtype=jnp.int32), (count, LENGTH // 16)),
            idx_mapping=jnp.arange(count, dtype=jnp.int32),
            lengths=ANCHORS[row],
        )
        served = jitted_run_block(
            of.draft,
            of.draft_config,
            of.target.embedding,
            context,
            tokens[row][ANCHORS[row]],
            of.draft_config.block_size - 1,
            implementation="reference",
        )
        np.testing.assert_allclose(trained[row], served, atol=5e-5)


@pytest.mark.parametrize("pair", PAIRS)
def test_features_from_the_anchor_on_do_not_matter(pair):
    tokens, features = tokens_and_features(pair)
    before = hidden_states(pair, features, tokens)
    place = 90
    after = hidden_states(pair, features.at[:, place:].add(7.0), tokens)
    blind = place >= ANCHORS
    np.testing.assert_array_equal(before[blind], after[blind])
    assert jnp.abs(before - after)[~blind].max() > 1e-3


@pytest.mark.parametrize("pair", PAIRS)
def test_the_last_feature_before_the_anchor_matters(pair):
    tokens, features = tokens_and_features(pair)
    before = hidden_states(pair, features, tokens)
    after = hidden_states(pair, features.at[0, 63].add(1.0), tokens)
    assert jnp.abs(before - after)[0, 2].min(-1).max() > 0
    np.testing.assert_array_equal(before[1], after[1])


def test_blocks_do_not_see_each_other():
    tokens, features = tokens_and_features("recall-dflash2")
    together = hidden_states("recall-dflash2", features, tokens)
    alone = hidden_states("recall-dflash2", features, tokens, ANCHORS[:, 3:4])
    np.testing.assert_allclose(together[:, 3:4], alone, atol=2e-5)
