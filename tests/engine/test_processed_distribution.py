"""What is sampled under each logits processor follows the processed distribution, drafted and plain alike.

The truth is worked out token by token in plain Python. Chi-square tests with fixed seeds: each would raise a false
alarm once in 10,000 seeds.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax import SamplingParams
from dflash_jax.engine.processors import UNKNOWN, Room, processing, processor_entries
from dflash_jax.engine.request import Request
from dflash_jax.sampling import Purpose, gumbel, verify
from tests.sampling.test_distribution import (
    ANCHOR,
    CANDIDATES,
    DRAFT_LOGITS,
    DRAWS,
    TARGET_LOGITS,
    VOCAB,
    assert_follows,
    sampler_of,
    truth,
)
from tests.slow import mostly_slow

PROMPT, OUTPUT = (4, 1, 3), (5, 0, ANCHOR)
STOPS = (1, 4)
ROWS = 1000
"""Rows at once; draws are made in so many batches as it takes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Parameters, and the token sequences that stand for bad words."""

    sampling: dict[str, Any]
    bad_words: tuple[tuple[int, ...], ...] = ()
    filters: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def request(self) -> Request:
        # The words only say that there are some.
        words = {"bad_words": ("x",)} if self.bad_words else {}
        params = SamplingParams().override({**self.sampling, **words})
        return Request("r", PROMPT, params, STOPS, 64, self.bad_words)


CASES = {
    "repetition": Case({"repetition_penalty": 1.8}),
    "repetition below 1": Case({"repetition_penalty": 0.6}),
    "presence": Case({"presence_penalty": 1.2}),
    "frequency": Case({"frequency_penalty": 0.9}),
    "negative": Case({"frequency_penalty": -0.7, "presence_penalty": -0.5}),
    "bias": Case({"logit_bias": {0: 1.5, "3": -2, 5: 0.5}}),
    "allowed": Case({"allowed_token_ids": [0, 2, 3, 5]}),
    "one bad token": Case({}, ((3,),)),
    "bad word begun by the output": Case({}, ((0, ANCHOR, 3), (5, 0, ANCHOR, 4), (1, ANCHOR, 5))),
    "bad word begun by a drafted token": Case({}, ((0, 3), (ANCHOR, 5, 1), (3, 3), (4, 0))),
    "min_tokens, not yet": Case({"min_tokens": 9}),
    "min_tokens, from the second on": Case({"min_tokens": 4}),
    "all of them, filtered": Case(
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
            "logit_bias": {5: 1.0},
            "allowed_token_ids": [0, 1, 2, 3, 5],
            "min_tokens": 4,
        },
        ((0, 0),),
        {"top_k": 4, "temperature": 1.2},
    ),
}


def naive(logits, request: Request, output: tuple[int, ...]) -> np.ndarray:
    """The processed logits after some output, one token of the vocabulary after the other."""
    sampling, processed = request.sampling, [float(logit) for logit in logits]
    for token, bias in sampling.biases:
        processed[token] += bias
    for token in range(len(processed)):
        if token in (*request.prompt, *output):
            factor = sampling.repetition_penalty
            processed[token] = processed[token] / factor if processed[token] > 0 else processed[token] * factor
        count = output.count(token)
        processed[token] -= count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            processed[token] = -np.inf
        if len(output) < sampling.min_tokens and token in request.stop_tokens:
            processed[token] = -np.inf
    for *beginning, last in request.bad_words:
        if output[len(output) - len(beginning) :] == tuple(beginning):
            processed[last] = -np.inf
    return np.array(processed)


def entries(request: Request, output: tuple[int, ...], vocab: int = VOCAB):
    held = processor_entries([(request, request.prompt + output)], Room(32, vocab))
    return held.replace(active=np.ones(1, bool))


def process_of(held, length: int, drafts, added=None):
    """What a request does to the logits of rows that are all alike but for their drafted tokens.

    `added` is one more committed token of each row.
    """
    rows = drafts.shape[0]
    held = jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf), rows, axis=0), held)
    if added is not None:
        held = held.replace(history=held.history.at[:, length].set(added))
        length += 1
    stops = jnp.broadcast_to(jnp.asarray(STOPS), (rows, len(STOPS)))
    return processing(held, jnp.arange(rows), jnp.full(rows, length), drafts, stops)


@functools.partial(jax.jit, static_argnames="drafts")
def speculated_pair(seeds, sampler, held, drafts: int):
    """First two tokens after the anchor, of a draft that knows nothing of the request's parameters."""
    rows = seeds.shape[0]
    position = jnp.full(rows, len(PROMPT + OUTPUT) - 1)
    noise = gumbel(seeds, position[:, None] + 1 + jnp.arange(2), Purpose.PROPOSE, 4)
    previous, drafted, probs = jnp.full(rows, ANCHOR), [], []
    for index in range(drafts):
        scores = DRAFT_LOGITS[index][previous][:, CANDIDATES[index]]
        previous = CANDIDATES[index][jnp.argmax(scores + noise[:, index], axis=-1)]
        drafted.append(previous)
        probs.append(jax.nn.softmax(scores, axis=-1))
    none = jnp.zeros((rows, 0), jnp.int32)
    tokens = jnp.stack(drafted, 1) if drafts else none
    q = jnp.stack(probs, 1) if drafts else jnp.zeros((rows, 0, 4))
    inputs = jnp.concatenate([jnp.full((rows, 1), ANCHOR), tokens], axis=1)
    logits = jnp.stack([TARGET_LOGITS[i][inputs[:, i]] for i in range(1 + drafts)], axis=1)
    candidates = jnp.broadcast_to(CANDIDATES[:drafts], (rows, drafts, 4))
    length = len(PROMPT + OUTPUT)
    processed = process_of(held, length, tokens)(logits)
    verdict = verify(processed, tokens, jnp.full(rows, drafts), candidates, q, sampler, position)
    padded = jnp.concatenate([tokens, jnp.zeros((rows, 2), jnp.int32)], axis=1)
    first = jnp.where(verdict.accepted > 0, padded[:, 0], verdict.next_token)
    # The second token, where the first round did not reach it, comes from a plain round.
    after = process_of(held, length, none, added=first)(TARGET_LOGITS[1][first][:, None])
    zeros = jnp.zeros(rows, jnp.int32)
    nothing = jnp.zeros((rows, 0, 1))
    plain = verify(after, none, zeros, none[..., None], nothing, sampler, position + 1).next_token
    second = jnp.where(verdict.accepted > 1, padded[:, 1], jnp.where(verdict.accepted == 1, verdict.next_token, plain))
    return first, second


@pytest.mark.parametrize("drafts", mostly_slow(2, 1, 0))
@pytest.mark.parametrize("name", CASES)
def test_speculated_tokens_follow_the_processed_joint_distribution(name, drafts):
    case = CASES[name]
    request = case.request

    def draw(seeds):
        sampler = sampler_of(ROWS, **case.filters).replace(seed=seeds)
        return speculated_pair(seeds, sampler, entries(request, OUTPUT), drafts)

    seeds = jnp.arange(DRAWS // ROWS * ROWS, dtype=jnp.uint32).reshape(-1, ROWS) + 777
    pairs = [draw(batch) for batch in seeds]
    first, second = (np.concatenate([np.asarray(pair[which]) for pair in pairs]) for which in (0, 1))
    counts = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
    start = truth(naive(TARGET_LOGITS[0][ANCHOR], request, OUTPUT), **case.filters)
    joint = [start[a] * truth(naive(TARGET_LOGITS[1][a], request, (*OUTPUT, a)), **case.filters) for a in range(VOCAB)]
    assert_follows(counts, np.concatenate(joint))


LARGEST = float(np.finfo(np.float32).max)
TOKENS = st.integers(0, 7)
EXTREME = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([5e-324, 1e-38, 0.5, 1.0, 1.7, 1e30, 1e39, 1e308]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 5e-324, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.0, 1e-300, 100.0])),
        "allowed_token_ids": st.none() | st.lists(TOKENS, min_size=1),
        "min_tokens": st.integers(0, 6),
    }
)
LOGITS = st.sampled_from([-LARGEST, -1e30, -50.0, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.5, 50.0, 1e30, LARGEST])


@given(
    logits=st.lists(LOGITS, min_size=8, max_size=8),
    sampling=EXTREME,
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3, unique=True).map(tuple),
    output=st.lists(TOKENS, min_size=1, max_size=4).map(tuple),
    drafts=st.lists(st.integers(UNKNOWN, 7), min_size=2, max_size=2),
)
def test_at_the_ends_of_every_parameter_what_is_forbidden_is_and_nothing_is_nan(
    logits, sampling, bad_words, output, drafts
):
    request = Case({**sampling, "max_tokens": 64}, bad_words).request
    given_logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (1, 3, 8))
    held, length = entries(request, output, vocab=8), len(request.prompt + output)
    processed = np.asarray(_processed_once(held, length, jnp.asarray([drafts]), given_logits))[0]
    assert not np.isnan(processed).any()
    for position in range(3):
        before = (*output, *drafts[:position])
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = naive(logits, request, before)
        forbidden = np.isneginf(naive([0] * 8, request, before))
        assert np.isneginf(processed[position]).tolist() == forbidden.tolist()
        ordinary = np.abs(np.nan_to_num(wanted, neginf=0)) < 1e20
        # Penalties past float32 are brought into its range.
        if 1e-30 <= request.sampling.repetition_penalty <= 1e30 and ordinary.all():
            np.testing.assert_allclose(processed[position][~forbidden], wanted[~forbidden], rtol=1e-5, atol=1e-5)


@jax.jit
def _processed_once(held, length, drafts, logits):
    return process_of(held, length, drafts)(logits)


@pytest.mark.parametrize("damage", [np.nan, np.inf])
def test_logits_that_are_not_finite_stay_so_under_a_penalty(damage):
    request = Case({"repetition_penalty": 2.0, "presence_penalty": 1.0}).request
    logits = TARGET_LOGITS[0, ANCHOR].at[OUTPUT[0]].set(damage)[None, None]
    drafts = jnp.zeros((1, 0), jnp.int32)
    processed = np.asarray(process_of(entries(request, OUTPUT), len(PROMPT + OUTPUT), drafts)(logits))[0, 0]
    assert not np.isfinite(processed[OUTPUT[0]])


def test_rows_without_processors_keep_their_logits_to_the_bit():
    request = Case(
        {"repetition_penalty": 1.3, "logit_bias": {2: 3}, "allowed_token_ids": [1, 2], "min_tokens": 9}
    ).request
    held = jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf), 2, axis=0), entries(request, OUTPUT))
    held = held.replace(active=jnp.array([True, False]))
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, VOCAB)), jnp.float32)
    length = jnp.full(2, len(PROMPT + OUTPUT))
    stops = jnp.full((2, 8), -1)
    process = processing(held, jnp.arange(2), length, jnp.zeros((2, 2), jnp.int32), stops)
    processed = np.asarray(process(logits))
    assert (processed[1] == np.asarray(logits[1])).all()
    assert (processed[0] != np.asarray(logits[0])).any()
