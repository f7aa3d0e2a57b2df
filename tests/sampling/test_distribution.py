"""What is sampled follows the target's distribution, whatever was proposed.

Chi-square tests with fixed seeds: each would raise a false alarm once in 10,000 seeds (ALPHA).
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dflash_jax.sampling import Purpose, Sampler, gumbel, sample, target_probs, uniform, verify

ALPHA = 1e-4
DRAWS = int(os.environ.get("DFLASH_JAX_DRAWS", "20000"))
VOCAB = 6


def sampler_of(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Sampler:
    return Sampler(
        temperature=jnp.full(rows, temperature, jnp.float32),
        top_k=jnp.full(rows, top_k, jnp.int32),
        top_p=jnp.full(rows, top_p, jnp.float32),
        min_p=jnp.full(rows, min_p, jnp.float32),
        seed=jnp.arange(rows, dtype=jnp.uint32),
    )


def assert_follows(counts: np.ndarray, probs: np.ndarray) -> None:
    probs = np.asarray(probs, np.float64) / np.sum(probs, dtype=np.float64)
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was drawn"
    kept = probs > 0
    p_value = stats.chisquare(counts[kept], probs[kept] * counts.sum()).pvalue
    assert p_value > ALPHA, f"p = {p_value:.2e}: {counts / counts.sum()} is not {probs}"


def truth(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The filters said with a sort, one after the other."""
    scores = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scores)
    probs = np.exp(scores - scores.max())
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_target_probs_are_what_a_sort_gives(filters):
    logits = np.random.default_rng(0).normal(size=(4, 3, 50)).astype(np.float32) * 2
    probs = target_probs(jnp.asarray(logits), sampler_of(4, **filters))
    for row in range(4):
        for position in range(3):
            np.testing.assert_allclose(probs[row, position], truth(logits[row, position], **filters), atol=1e-6)


def test_sample_draws_each_token_as_often_as_its_weight_says():
    weights = jnp.array([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    draws = uniform(jnp.arange(DRAWS, dtype=jnp.uint32), jnp.full((DRAWS, 1), 7), Purpose.TARGET)[:, 0]
    tokens = sample(jnp.broadcast_to(weights, (DRAWS, VOCAB)), draws)
    assert_follows(np.bincount(tokens, minlength=VOCAB), np.asarray(weights))


def test_sample_at_the_ends_of_the_unit_interval_takes_a_token_of_positive_weight():
    weights = jnp.array([[0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 0.0]])
    assert sample(weights, jnp.array([0.0, np.nextafter(np.float32(1), np.float32(0))])).tolist() == [1, 2]


def test_draws_of_different_purpose_position_and_seed_are_unrelated():
    seeds, positions = jnp.arange(2000, dtype=jnp.uint32), jnp.arange(3) * jnp.ones((2000, 1), jnp.int32)
    columns = np.concatenate([uniform(seeds, positions, purpose) for purpose in Purpose], axis=1)
    correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlations).max() < 0.1


# A target over three positions, each depending on the token before, and a drafter of its own mind. Both are
# spread out, so that acceptance is neither rare nor sure and the residual has several tokens.
RNG = np.random.default_rng(5)
TARGET_LOGITS = jnp.asarray(RNG.normal(size=(3, VOCAB, VOCAB)).astype(np.float32) * 0.7)
DRAFT_LOGITS = jnp.asarray(RNG.normal(size=(2, VOCAB, VOCAB)).astype(np.float32) * 0.7)
CANDIDATES = jnp.asarray(np.stack([RNG.permutation(VOCAB)[:4] for _ in range(2)]), jnp.int32)
ANCHOR = 2


def speculated_pair(seeds, sampler: Sampler, drafts: int):
    """First two tokens after the anchor, drafting `drafts` tokens and going on plainly where needed."""
    rows = seeds.shape[0]
    position = jnp.full(rows, 10)
    noise = gumbel(seeds, position[:, None] + 1 + jnp.arange(2), Purpose.PROPOSE, 4)
    previous, drafted, probs = jnp.full(rows, ANCHOR), [], []
    for index in range(drafts):
        scores = DRAFT_LOGITS[index][previous][:, CANDIDATES[index]]
        choice = jnp.argmax(scores + noise[:, index], axis=-1)
        previous = CANDIDATES[index][choice]
        drafted.append(previous)
        probs.append(jax.nn.softmax(scores, axis=-1))
    tokens = jnp.stack(drafted, 1) if drafts else jnp.zeros((rows, 0), jnp.int32)
    q = jnp.stack(probs, 1) if drafts else jnp.zeros((rows, 0, 4))
    inputs = jnp.concatenate([jnp.full((rows, 1), ANCHOR), tokens], axis=1)
    logits = jnp.stack([TARGET_LOGITS[i][inputs[:, i]] for i in range(1 + drafts)], axis=1)
    candidates = jnp.broadcast_to(CANDIDATES[:drafts], (rows, drafts, 4))
    verdict = verify(logits, tokens, jnp.full(rows, drafts), candidates, q, sampler, position)
    padded = jnp.concatenate([tokens, jnp.zeros((rows, 2), jnp.int32)], axis=1)
    first = jnp.where(verdict.accepted > 0, padded[:, 0], verdict.next_token)
    # The second token, where the first round did not reach it, comes from a plain round.
    plain = verify(
        TARGET_LOGITS[1][first][:, None],
        jnp.zeros((rows, 0), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, 0, 1), jnp.int32),
        jnp.zeros((rows, 0, 1)),
        sampler,
        position + 1,
    ).next_token
    second = jnp.where(verdict.accepted > 1, padded[:, 1], jnp.where(verdict.accepted == 1, verdict.next_token, plain))
    return first, second


@pytest.mark.parametrize("drafts", [0, 1, 2])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}], ids=str)
def test_speculated_tokens_follow_the_targets_joint_distribution(drafts, filters):
    seeds = jnp.arange(DRAWS, dtype=jnp.uint32) + 12345
    sampler = sampler_of(DRAWS, **filters).replace(seed=seeds)
    first, second = jax.jit(speculated_pair, static_argnames="drafts")(seeds, sampler, drafts=drafts)
    counts = np.bincount(np.asarray(first) * VOCAB + np.asarray(second), minlength=VOCAB**2)
    start = truth(TARGET_LOGITS[0][ANCHOR], **filters)
    joint = [start[a] * truth(TARGET_LOGITS[1][a], **filters) for a in range(VOCAB)]
    assert_follows(counts, np.concatenate(joint))


def test_a_one_hot_proposal_is_resampled_without_bias():
    """DFlash 1 under sampling: q puts everything on the argmax."""
    sampler = sampler_of(DRAWS)
    logits = jnp.broadcast_to(TARGET_LOGITS[0, ANCHOR], (DRAWS, 2, VOCAB))
    drafted = jnp.full((DRAWS, 1), 3)
    drafts, certain, position = jnp.ones(DRAWS, jnp.int32), jnp.ones((DRAWS, 1, 1)), jnp.zeros(DRAWS, jnp.int32)
    verdict = verify(logits, drafted, drafts, drafted[..., None], certain, sampler, position)
    first = jnp.where(verdict.accepted > 0, 3, verdict.next_token)
    assert_follows(np.bincount(first, minlength=VOCAB), truth(TARGET_LOGITS[0, ANCHOR]))


def test_greedy_rows_among_sampled_ones_stay_greedy():
    logits = jnp.broadcast_to(TARGET_LOGITS[0, ANCHOR], (2, 1, VOCAB))
    sampler = sampler_of(2).replace(temperature=jnp.array([0.0, 5.0]))
    none = jnp.zeros((2, 0), jnp.int32)
    decide = jax.jit(verify)
    for seed in range(50):
        seeded = sampler.replace(seed=jnp.full(2, seed, jnp.uint32))
        zeros = jnp.zeros(2, jnp.int32)
        verdict = decide(logits, none, zeros, none[..., None], jnp.zeros((2, 0, 1)), seeded, zeros)
        assert int(verdict.next_token[0]) == int(jnp.argmax(logits[0, 0]))
