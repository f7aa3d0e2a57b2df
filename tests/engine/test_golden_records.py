"""Generation against the records of the pairs: tokens, tokens per round, drafted blocks.

Those of the golden pairs are the reference package's. That of the trained pair is the engine's own, of requests
alone: it shows that nothing depends on company, and that an engine still drafts what it did.
"""

from __future__ import annotations

import random

import pytest

from tests.pairs import PAIRS, SAMPLING, SERVED, assert_is_golden, cases, engine, prompts


@pytest.mark.parametrize("pair", SERVED)
def test_each_case_alone_is_the_golden_record(pair):
    for case in cases(pair):
        completion = engine(pair, prefix_cache=False).generate([case["prompt"]], SAMPLING)[0]
        assert_is_golden(completion, case)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("pair", SERVED)
def test_all_cases_at_once_are_as_alone(pair):
    served = engine(pair, slots=3)
    for completion, case in zip(served.generate(prompts(pair), SAMPLING), cases(pair), strict=True):
        assert_is_golden(completion, case)


@pytest.mark.parametrize("pair", SERVED)
def test_noise_in_random_order_changes_nothing(pair):
    noise = [prompt for other in PAIRS if other != pair for prompt in prompts(other)]
    queue = [(prompt, None) for prompt in noise] + [(case["prompt"], case) for case in cases(pair)]
    random.Random(pair).shuffle(queue)
    served = engine(pair, slots=3)
    for completion, (_, case) in zip(served.generate([p for p, _ in queue], SAMPLING), queue, strict=True):
        if case is not None:
            assert_is_golden(completion, case)


def test_several_rounds_per_step_are_the_same_rounds():
    pair = PAIRS[1]
    served = engine(pair, slots=3, rounds_per_step=3)
    for completion, case in zip(served.generate(prompts(pair), SAMPLING), cases(pair), strict=True):
        assert_is_golden(completion, case)


def test_plain_decoding_gives_the_same_tokens():
    pair = PAIRS[1]
    for completion, case in zip(engine(None).generate(prompts(pair), SAMPLING), cases(pair), strict=True):
        assert list(completion.token_ids) == case["greedy_tokens"]
        assert completion.metrics.drafts_proposed == 0
