"""Metrics count what became output, however a request ends."""

from __future__ import annotations

import pytest

from dflash_jax import Engine
from tests.byte_tokenizer import byte_tokenizer
from tests.pairs import SAMPLING, engine, models

PAIR = "recall-dflash2"
# The README's.
PROMPT = [60, 26, 48, 5, 44, 48, 29, 32, 13, 36, 5, 26, 48, 17, 44, 48, 4, 32, 13, 36, 17, 26, 48, 54]


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("length", range(2, 14))
def test_a_stop_string_and_a_stop_token_at_the_same_place_count_the_same(length, rounds):
    plain = engine(PAIR).generate([PROMPT], SAMPLING)[0].token_ids
    token = plain[length - 1]
    tokenizer = byte_tokenizer()
    config = engine(PAIR, rounds_per_step=rounds).config
    served = Engine(models(PAIR), config, tokenizer=tokenizer)
    by_string = served.generate([PROMPT], {**SAMPLING, "stop": [tokenizer.decode([token])]})[0]
    by_token = served.generate([PROMPT], {**SAMPLING, "stop_token_ids": [token]})[0]
    assert by_string.token_ids == by_token.token_ids == plain[: plain.index(token) + 1]
    assert by_string.produced_per_round == by_token.produced_per_round
    assert by_string.drafted_blocks == by_token.drafted_blocks
    assert by_string.metrics.drafts_accepted == by_token.metrics.drafts_accepted
    assert sum(by_string.produced_per_round) == len(by_string.token_ids) - 1


def test_the_readmes_prompt_ended_by_its_third_token():
    served = Engine(models(PAIR), engine(PAIR).config, tokenizer=byte_tokenizer())
    third = byte_tokenizer().decode(engine(PAIR).generate([PROMPT], {"max_tokens": 3})[0].token_ids[-1:])
    completion = served.generate([PROMPT], {"max_tokens": 48, "stop": [third]})[0]
    assert len(completion.token_ids) == 3
    assert completion.produced_per_round == (2,) and completion.metrics.drafts_accepted == 1
