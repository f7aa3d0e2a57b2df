"""The comparison with plain decoding: a few prompts, in turns, with its spread told."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_jax.acceptance import Acceptance
from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.output import Completion, Metrics, Update
from dflash_jax.engine.request import SamplingParams
from dflash_jax.jobs.compare import compare_plain
from dflash_jax.jobs.reader import Item

PREFILL = 0.5


@dataclasses.dataclass
class Told:
    """An engine that answers at known speeds: a plain token takes 4 ms of its clock, a drafted one 2 or 1.

    A prompt takes half a second; a round with a draft brings `accepted` tokens more than one.
    """

    slots: int
    now: float = 0.0
    accepted: int = 1

    def __post_init__(self):
        self.config = EngineConfig(max_slots=self.slots)
        self.queue, self.runs, self.begun = [], [], False

    @property
    def has_work(self):
        return bool(self.queue)

    def add_request(self, prompt, sampling):
        self.queue.append((prompt, sampling))
        return f"{len(self.queue)}"

    def step(self):
        if not self.begun:
            self.begun, self.now = True, self.now + PREFILL
            return [Update(f"{n}", (1,), "", None) for n, _ in enumerate(self.queue, start=1)]
        (first, sampling), batch = self.queue[0], self.queue
        self.runs.append((tuple(prompt for prompt, _ in batch), sampling.speculation, sampling.max_tokens))
        seconds = (2e-3 if first == "slow" else 1e-3) if sampling.speculation else 4e-3
        self.now += seconds * (sampling.max_tokens - 1) * len(batch)
        self.queue, self.begun = [], False
        return [Update(f"{n}", (1,) * (s.max_tokens - 1), "", self.done(s)) for n, (_, s) in enumerate(batch, start=1)]

    def done(self, sampling):
        drafted = (3, self.accepted, 1) if sampling.speculation else (0, 0, 0)
        metrics = Metrics(*drafted, None, None, None, None, 0, 0)
        return Completion("", 1, (1,) * sampling.max_tokens, "", "length", None, None, metrics, (), ())


def compare(engine, prompts, max_tokens=None, **known):
    items = [Item(n, n, prompt, SamplingParams(max_tokens=40)) for n, prompt in enumerate(prompts, start=1)]
    return compare_plain(engine, items, max_tokens=max_tokens, clock=lambda: engine.now, **known)


def test_the_spread_is_that_of_the_pairs():
    found = compare(Told(slots=1), ["slow", "fast", "fast", "fast"])
    assert (found["speedup_min"], found["speedup_max"], found["pairs"]) == (2.0, 4.0, 4)
    assert found["speedup"] == round(16 / 5, 4) and found["plain_tokens_per_s"] == 250
    assert found["greedy_requests"] == found["greedy_equal"] == found["requests"] == 4


def test_each_prompt_runs_both_ways_at_once_after_the_other_and_the_order_alternates():
    engine = Told(slots=1)
    compare(engine, "abcd", max_tokens=8)
    timed = [(prompts, way) for prompts, way, tokens in engine.runs if tokens == 8]
    assert timed == [
        (("a",), False),
        (("a",), True),
        (("b",), True),
        (("b",), False),
        (("c",), False),
        (("c",), True),
        (("d",), True),
        (("d",), False),
    ]


def test_as_many_prompts_run_at_once_as_there_are_slots_and_few_run_again():
    engine = Told(slots=3)
    assert compare(engine, "abcde", max_tokens=8)["pairs"] == 4
    timed = [prompts for prompts, way, tokens in engine.runs if tokens == 8 and way]
    assert timed == [("a", "b", "c"), ("d", "e")] * 2


def test_no_more_is_run_than_a_few_prompts_for_a_few_tokens():
    engine = Told(slots=1)
    compare(engine, "abcd", max_tokens=8)
    # Each prompt once each way, and a few tokens of the first before.
    assert sum(tokens for _, _, tokens in engine.runs) == 4 * 2 * 8 + 2 * 4


def test_prompts_are_in_no_speed():
    assert compare(Told(slots=2), "abcd", max_tokens=8)["plain_tokens_per_s"] == 250


@pytest.mark.parametrize(("seconds", "tokens"), [(0.4, 20), (4.0, 40), (0.0, 8), (0.02, 8)])
def test_answers_are_as_long_as_there_is_time_for_and_a_few_rounds_at_least(seconds, tokens):
    engine = Told(slots=1)
    # A token takes 4 ms one way and 1 ms the other, of four prompts.
    compare(engine, "abcd", max_tokens=40, seconds=seconds)
    assert {limit for _, _, limit in engine.runs if limit != 4} == {tokens}


def test_the_acceptance_of_many_answers_counts_in_place_of_that_of_a_few_short_runs():
    engine = Told(slots=1, accepted=1)
    measured = compare(engine, "abcd", max_tokens=8)
    told = compare(engine, "abcd", max_tokens=8, acceptance=Acceptance(300, 200, 100))
    assert measured["mean_acceptance_length"] == 2 and told["mean_acceptance_length"] == 3
    assert told["speedup"] == pytest.approx(measured["speedup"] * 3 / 2)
    assert told["speedup_min"] == told["speedup_max"] == told["speedup"]
    none_drafted = compare(engine, "abcd", max_tokens=8, acceptance=Acceptance())
    assert none_drafted["speedup"] == measured["speedup"]


def test_a_comparison_ends_before_it_takes_longer_than_it_may():
    # A pair takes 2 * 0.5 s for the prompts, and 0.2 s for the tokens.
    for most, pairs in ((100.0, 4), (5.0, 3), (0.1, 1)):
        engine = Told(slots=1)
        found = compare(engine, "abcd", max_tokens=40, most_seconds=most)
        assert (found["pairs"], found["requests"], found["greedy_requests"]) == (pairs,) * 3
        assert engine.now <= most or pairs == 1
