"""Anchors and the labels of their blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.training.objective.anchors import Anchors, block_labels, sample_anchors


@given(st.integers(0, 9), st.integers(1, 20), st.integers(1, 16), st.integers(0, 2**31 - 1))
def test_anchors_are_distinct_places_of_the_answer_that_have_a_successor(prompt_len, length, count, seed):
    seq_lens = jnp.array([length, 20], jnp.int32)
    anchors = sample_anchors(jax.random.key(seed), jnp.array([prompt_len, 0], jnp.int32), seq_lens, 20, count)
    for row in range(2):
        found = np.asarray(anchors.positions[row])[np.asarray(anchors.valid[row])]
        places = range(max((prompt_len, 0)[row] - 1, 0), int(seq_lens[row]) - 1)
        assert len(set(found.tolist())) == len(found) == min(count, len(places))
        assert set(found.tolist()) <= set(places)
        assert np.all(np.diff(np.asarray(anchors.positions[row])) > 0)


def test_labels_end_with_the_sequence():
    tokens = jnp.arange(10, dtype=jnp.int32)[None] + 100
    anchors = Anchors(jnp.array([[2, 5, 6]], jnp.int32), jnp.array([[True, True, False]]))
    blocks, exists = block_labels(tokens, jnp.array([8], jnp.int32), anchors, 4)
    assert blocks[0, 0].tolist() == [102, 103, 104, 105]
    assert exists[0].tolist() == [[True] * 3, [True, True, False], [False] * 3]
