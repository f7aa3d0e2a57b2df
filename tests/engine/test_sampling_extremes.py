"""Sampling parameters at the ends of their ranges, as a request gives them."""

from __future__ import annotations

import warnings

import pytest

from dflash_jax import RequestError, SamplingParams
from tests.pairs import alone, engine, prompts

PAIR = "recall-dflash2"


@pytest.mark.parametrize("sampling", [{"top_p": 1e-38}, {"top_p": 5e-324}, {"min_p": 1.0}, {"temperature": 1e-40}])
def test_parameters_that_leave_only_the_best_token_answer_as_greedy_does(sampling):
    prompt = tuple(prompts(PAIR)[2])
    sampled = alone(PAIR, prompt, tuple({"temperature": 1.0, "max_tokens": 24, "seed": 3, **sampling}.items()))
    assert sampled.token_ids == alone(PAIR, prompt, (("max_tokens", 24),)).token_ids


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e308, 10**200])
def test_temperatures_past_float32_warn_of_nothing_and_draw_from_the_whole_vocabulary(temperature):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (answer,) = engine(PAIR).generate([prompts(PAIR)[2]], {"temperature": temperature, "max_tokens": 24})
    assert answer.finish_reason in ("stop", "length")
    assert len(set(answer.token_ids)) > len(answer.token_ids) // 2


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
def test_numbers_past_every_float_are_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"sampling.{name} is ") as refused:
        SamplingParams().override({name: value})
    assert len(str(refused.value)) < 200
