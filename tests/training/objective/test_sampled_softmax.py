"""The tokens that a step's softmax runs over."""

from __future__ import annotations

import jax
import numpy as np

from dflash_jax.training.objective.sampled_softmax import draw_subset, plan_subset


def test_a_subset_is_the_frequent_tokens_and_a_fresh_draw_of_the_others():
    token_counts = np.array([0, 5, 9, 0, 1, 7])
    plan = plan_subset(token_counts, unseen=True, frequent=2, drawn=2)
    subset = draw_subset(jax.random.key(0), plan)
    assert subset.tokens[:2].tolist() == [2, 5]
    drawn = set(subset.tokens[2:].tolist())
    assert len(drawn) == 2 and drawn <= {0, 1, 3, 4}
    np.testing.assert_allclose(subset.log_weight, [0, 0, np.log(2), np.log(2)], rtol=1e-6)
    assert len({tuple(draw_subset(jax.random.key(seed), plan).tokens.tolist()) for seed in range(20)}) > 3
    assert plan_subset(token_counts, unseen=False, frequent=None, drawn=4).frequent.tolist() == [1, 2, 4, 5]
