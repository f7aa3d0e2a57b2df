"""Parameters and logits at the ends of their ranges: always a distribution, always the one that was asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.sampling import Sampler, device_temperature, target_probs
from tests.sampling.test_distribution import (
    ANCHOR,
    DRAWS,
    TARGET_LOGITS,
    VOCAB,
    assert_follows,
    sampler_of,
    speculated_pair,
    truth,
)

TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)


def extreme_sampler(rows: int, **filters) -> Sampler:
    temperature = filters.pop("temperature", 1.0)
    return sampler_of(rows, temperature=device_temperature(temperature), **filters)


@pytest.mark.parametrize("top_p", [1e-37, TINY, 1e-38, 1e-40, 1e-45, 1e-50, 5e-324])
def test_top_p_too_small_for_float32_keeps_the_best_token(top_p):
    logits = jnp.asarray([[[0.0, 2.0, 5.0, 1.0]]])
    assert target_probs(logits, extreme_sampler(1, top_p=top_p)).tolist() == [[[0, 0, 1, 0]]]


TEMPERATURES = [0.0, 5e-324, 1e-300, 1e-45, TINY, 1e-30, 1e-3, 1.0, 1e3, 1e30, LARGEST, 1e39, 1e308]
LOGITS = st.sampled_from([-LARGEST, -1e30, -50.0, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1e-30, 1.0, 1.5, 50.0, 1e30, LARGEST])


@given(
    logits=st.lists(LOGITS, min_size=8, max_size=8),
    temperature=st.sampled_from(TEMPERATURES),
    top_k=st.sampled_from([0, 1, 2, 7, 8, 9, 2**31 - 1]),
    top_p=st.sampled_from([5e-324, 1e-45, 1e-38, 1e-7, 0.5, 1 - 1e-7, 1 - 1e-12, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 1e-38, 0.5, 1 - 1e-12, 1.0]),
)
def test_whatever_the_parameters_the_best_token_can_be_drawn_and_nothing_is_nan(
    logits, temperature, top_k, top_p, min_p
):
    sampler = extreme_sampler(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with np.errstate(all="raise"):
        probs = np.asarray(_probs(jnp.asarray(logits, jnp.float32)[None, None], sampler))[0, 0]
    assert np.isfinite(probs).all()
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    assert probs[np.argmax(np.asarray(logits, np.float32))] == probs.max() > 0
    if top_k == 1:
        assert (probs > 0).sum() == (np.asarray(logits, np.float32) == np.float32(max(logits))).sum()


_probs = jax.jit(target_probs)


@pytest.mark.parametrize("raw", [0.0, float("inf"), 1e-45, LARGEST])
def test_temperatures_that_were_never_brought_into_range_do_no_harm_either(raw):
    sampler = sampler_of(1, temperature=1.0).replace(temperature=jnp.asarray([raw], jnp.float32))
    assert np.isfinite(target_probs(jnp.asarray([[[1e5, -1e5, 3.0]]]), sampler)).all()


EXTREMES = [
    {"temperature": 1e-300},
    {"temperature": 1e-38},
    {"temperature": 1e39},
    {"temperature": 1e39, "top_p": 0.5},
    {"temperature": 1e39, "top_k": 2},
    {"temperature": 1e39, "min_p": 1.0},
    {"temperature": 1e-3, "top_p": 1 - 1e-12},
    {"top_p": 1e-38},
    {"top_p": 5e-324, "temperature": 3.0},
    {"top_p": 1 - 1e-12},
    {"top_k": 1},
    {"top_k": 2**31 - 1},
    {"min_p": 1.0},
    {"min_p": 5e-324},
]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("filters", EXTREMES, ids=str)
def test_drafted_tokens_follow_the_plain_distribution_at_the_ends_of_every_parameter(drafts, filters):
    seeds = jnp.arange(DRAWS, dtype=jnp.uint32) + jnp.uint32(2**32 - DRAWS // 2)
    sampler = extreme_sampler(DRAWS, **filters).replace(seed=seeds)
    first, second = jax.jit(speculated_pair, static_argnames="drafts")(seeds, sampler, drafts=drafts)
    counts = np.bincount(np.asarray(first) * VOCAB + np.asarray(second), minlength=VOCAB**2)
    start = truth(TARGET_LOGITS[0][ANCHOR], **filters)
    joint = np.concatenate([start[token] * truth(TARGET_LOGITS[1][token], **filters) for token in range(VOCAB)])
    if (joint > 0).sum() == 1:
        assert counts[joint > 0] == DRAWS
    else:
        assert_follows(counts, joint)
