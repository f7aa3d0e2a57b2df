"""Sampled requests: what one draws depends on its prompt, its seed and nothing else."""

from __future__ import annotations

import random

import pytest

from tests.pairs import ALL_TRAINED, alone, engine, prompts, record

PAIR = "recall-dflash2"
HOT = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


def hot(seed: int, **more) -> dict:
    return {**HOT, "seed": seed, **more}


@pytest.mark.parametrize("pair", ["recall-dflash2", "recall-dflash1", *ALL_TRAINED])
def test_a_requests_tokens_and_drafts_do_not_depend_on_company_or_row(pair):
    queue = [(prompts(pair)[index % 5], hot(index, temperature=(1.0, 0.0, 0.6)[index % 3])) for index in range(9)]
    order = list(range(9))
    random.Random(1).shuffle(order)
    served = engine(pair)
    for index in order:
        served.add_request(*queue[index], request_id=str(index))
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
    for index, (prompt, sampling) in enumerate(queue):
        assert record(done[str(index)]) == record(alone(pair, tuple(prompt), tuple(sampling.items())))


def test_different_seeds_draw_different_tokens_and_equal_ones_the_same():
    prompt = (60, 25, 23)  # the rule leaves its next tokens open
    draws = {alone(PAIR, prompt, tuple(hot(seed, temperature=4.0).items())).token_ids for seed in range(6)}
    assert len(draws) > 3
    again = engine(PAIR, prefix_cache=False).generate([prompt], hot(0, temperature=4.0))[0]
    assert again.token_ids in draws


def test_top_k_of_one_is_greedy():
    prompt = tuple(prompts(PAIR)[2])
    sampled = alone(PAIR, prompt, tuple(hot(3, top_k=1).items()))
    assert sampled.token_ids == alone(PAIR, prompt, (("max_tokens", 24),)).token_ids
    assert sampled.metrics.drafts_accepted > 0


def test_sampled_requests_resume_after_preemption_with_the_same_tokens():
    served = engine(PAIR, pages=6)
    completions = served.generate([p for p in prompts(PAIR)[1:4]], hot(5))
    assert served.host.counters.preemptions > 0
    for completion, prompt in zip(completions, prompts(PAIR)[1:4], strict=True):
        assert completion.token_ids == alone(PAIR, tuple(prompt), tuple(hot(5).items())).token_ids
