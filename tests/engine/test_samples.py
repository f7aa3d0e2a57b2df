"""`n` samples of a prompt: each is a request of its own seed, and the prompt is run once."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_jax import Engine, RequestError, SamplingParams
from dflash_jax.engine import sample_id, samples_of
from dflash_jax.engine.request import MAX_SAMPLES
from tests.engine.test_snapshots import finish
from tests.pairs import HYBRID, alone, engine, prompts, record

PAIR = "recall-dflash2"
HOT = {"temperature": 4.0, "max_tokens": 20, "ignore_eos": True, "seed": 2**32 - 2}


def own(index: int) -> tuple:
    """What sample `index` of `HOT` asks for as a request of its own, spelt out."""
    return tuple({**HOT, "seed": (2**32 - 2 + index) % 2**32}.items())


def test_each_sample_is_the_answer_of_a_request_of_its_own_with_the_derived_seed():
    prompt = tuple(prompts(PAIR)[1])
    [completion] = engine(PAIR).generate([prompt], {**HOT, "n": 4})
    assert completion.samples[0] is completion and len(completion.samples) == 4
    assert len({sample.token_ids for sample in completion.samples}) > 1
    for index, sample in enumerate(completion.samples):
        assert record(sample) == record(alone(PAIR, prompt, own(index)))
        assert sample.id == sample_id(completion.id, index)


@pytest.mark.parametrize("pair", [PAIR, HYBRID])
def test_the_prompt_is_run_once_and_the_others_share_its_pages(pair):
    served, prompt = engine(pair, prefill_chunk=16), max(prompts(pair), key=len)
    [completion] = served.generate([prompt], {**HOT, "n": 4})
    shared = (len(prompt) - 1) // 16 * 16
    assert shared >= 32
    assert [sample.metrics.cached_tokens for sample in completion.samples] == [0, shared, shared, shared]
    assert served.counters()["prefix_tokens_saved"] == 3 * shared


def test_samples_that_wait_for_their_prompt_let_others_pass():
    served, long, short = engine(PAIR, prefill_chunk=16), prompts(PAIR)[4], prompts(PAIR)[0]
    served.add_request(long, {**HOT, "n": 3}, request_id="long")
    served.add_request(short, HOT, request_id="short")
    served.step()
    assert {sequence.id for sequence in served.host.running} == {"long", "short"}
    done = finish(served)
    assert set(done) == {"long", "long#1", "long#2", "short"}
    assert record(done["short"]) == record(alone(PAIR, tuple(short), own(0)))


def test_samples_do_not_wait_where_nothing_can_be_shared():
    uncached, short = (engine(PAIR, prefix_cache=False), prompts(PAIR)[4]), (engine(PAIR), prompts(PAIR)[0])
    without_states = engine(HYBRID, checkpoints=0), max(prompts(HYBRID), key=len)
    for served, prompt in (uncached, short, without_states):
        served.add_request(prompt, {**HOT, "n": 3}, request_id="0")
        served.step()
        assert len(served.host.running) == 3


def test_samples_whose_first_is_aborted_or_preempted_go_on():
    prompt = prompts(PAIR)[4]
    served = engine(PAIR, prefill_chunk=16)
    served.add_request(prompt, {**HOT, "n": 3}, request_id="0")
    served.step()
    served.abort("0")
    done = finish(served)
    assert set(done) == {"0#1", "0#2"}
    served = engine(PAIR, pages=11)
    [completion] = served.generate([prompt], {**HOT, "n": 4})
    for index, sample in enumerate(completion.samples):
        assert sample.token_ids == alone(PAIR, tuple(prompt), own(index)).token_ids


def test_a_restored_engine_finishes_all_samples(tmp_path):
    served, prompt = engine(PAIR), prompts(PAIR)[2]
    served.add_request(prompt, {**HOT, "n": 3}, request_id="0")
    served.step()
    served.snapshot(tmp_path / "snapshot")
    done = finish(Engine.restore(tmp_path / "snapshot", engine(PAIR)))
    for index in range(3):
        assert record(done[sample_id("0", index)]) == record(alone(PAIR, tuple(prompt), own(index)))


def test_log_probabilities_of_the_prompt_come_with_the_first_sample():
    [completion] = engine(PAIR).generate(prompts(PAIR)[2], {**HOT, "n": 2, "logprobs": 1, "prompt_logprobs": 1})
    first, second = completion.samples
    assert len(first.prompt_logprobs) == len(prompts(PAIR)[2]) and second.prompt_logprobs is None
    assert all([one.token_id for one in sample.logprobs] == list(sample.token_ids) for sample in completion.samples)


def test_an_id_that_is_taken_queues_no_sample_at_all():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[0], HOT, request_id="a#1")
    with pytest.raises(RequestError, match="request id 'a#1' is in flight already"):
        served.add_request(prompts(PAIR)[0], {**HOT, "n": 2}, request_id="a")
    assert [sequence.id for sequence in served.host.in_flight] == ["a#1"]


def test_samples_of_spells_out_what_each_sample_asks_for():
    sampling = SamplingParams(temperature=1.0, seed=2**32 - 1, n=2, prompt_logprobs=3)
    first, second = samples_of("x", sampling)
    assert first == ("x", dataclasses.replace(sampling, n=1))
    assert second == ("x#1", dataclasses.replace(sampling, n=1, seed=0, prompt_logprobs=None))


@pytest.mark.parametrize("n", [0, -1, MAX_SAMPLES + 1, 1.5, True, "2"])
def test_other_numbers_of_samples_are_refused(n):
    with pytest.raises(RequestError, match=rf"sampling\.n is .*an integer of 1 to {MAX_SAMPLES}"):
        SamplingParams(temperature=1.0, n=n)


def test_equal_samples_are_refused():
    with pytest.raises(RequestError, match=r"sampling\.n is 2 and sampling\.temperature 0, so that all samples"):
        SamplingParams(n=2)
