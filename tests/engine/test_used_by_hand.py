"""An engine that is used in any order its methods can be called in: nothing is lost, doubled or waited for in vain."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from itertools import islice

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, RequestError, SamplingParams, StateError
from dflash_jax.engine import engine as engine_module
from tests.pairs import GOLDEN, SAMPLING, SIZES, alone, engine, prompts, record

PAIR = "recall-dflash2"
SHORT = {"max_tokens": 4, "ignore_eos": True}
CONFIG = {"target": {"path": str(GOLDEN / "recall-target")}, "draft": {"path": str(GOLDEN / PAIR)}, "engine": SIZES}


def finish(served: Engine) -> dict:
    done: dict = {}
    while served.has_work:
        for update in served.step():
            if update.completion is not None:
                assert update.id not in done
                done[update.id] = update.completion
    return done


def test_a_stream_that_nobody_reads_from_ends_its_requests():
    served = engine(PAIR)
    updates = served.stream(prompts(PAIR)[:2], SAMPLING)
    assert len(served.host.waiting) == 2
    del updates
    gc.collect()
    assert not served.has_work


def test_a_stream_whose_request_is_aborted_ends():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[2], SHORT, request_id="other")
    seen = []
    for update in served.stream([prompts(PAIR)[1]], SAMPLING):
        seen.append(update)
        if len(seen) == 2:
            served.abort(update.id)
    assert len(seen) == 2 and finish(served).keys() == {"other"}


def test_a_stream_whose_updates_step_has_taken_ends():
    served = engine(PAIR)
    updates = served.stream([prompts(PAIR)[1]], SAMPLING)
    [first] = islice(updates, 1)
    taken = finish(served)[first.id]
    assert list(updates) == [] and record(taken) == record(alone(PAIR, tuple(prompts(PAIR)[1])))


def test_made_up_ids_pass_over_those_that_are_taken():
    served = engine(PAIR)
    taken = {served.add_request([5, 9], SHORT, request_id=f"request-{number}") for number in (0, 2)}
    made = {served.add_request([5, 9], SHORT) for _ in range(3)}
    assert made == {"request-1", "request-3", "request-4"}
    assert len(served.generate([[5, 9]], SHORT)) == 1
    assert finish(served).keys() == taken | made


def test_an_id_is_taken_until_its_completion_is_delivered():
    served = engine(PAIR)
    served.add_request([5, 9], SHORT, request_id="a")
    served.generate([prompts(PAIR)[1]], SAMPLING)
    assert served.host.find("a") is None
    with pytest.raises(RequestError, match="'a' has an update that was not delivered yet"):
        served.add_request([7], SHORT, request_id="a")
    assert len(finish(served)["a"].token_ids) == 4
    served.add_request([7], SHORT, request_id="a")
    assert len(finish(served)["a"].token_ids) == 4


def test_what_was_not_delivered_of_an_aborted_request_is_in_its_completion_alone():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="a")
    with pytest.raises(StopIteration):
        updates = served.stream([prompts(PAIR)[2]], SHORT)
        while True:
            next(updates)
    aborted = served.abort("a")
    assert aborted.token_ids and not served.has_work
    served.add_request([5, 9], SHORT, request_id="a")
    seen: list[int] = []
    while served.has_work:
        for update in served.step():
            seen.extend(update.token_ids)
    assert len(seen) == 4


def test_generate_says_so_when_its_completion_went_elsewhere():
    served, step = engine(PAIR), engine_module.step

    def stealing(*arguments):
        host, state, updates = step(*arguments)
        return host, state, [update for update in updates if update.completion is None]

    engine_module.step = stealing
    try:
        with pytest.raises(StateError, match="'request-0' was aborted, or its last update taken"):
            served.generate([[5, 9]], SHORT)
    finally:
        engine_module.step = step


def test_a_first_draft_drafts_for_those_who_want_it_alone():
    plain = engine(None)
    for wanted in (True, False):
        sampling = {**SAMPLING, "speculation": wanted}
        plain.add_request(prompts(PAIR)[1], sampling, request_id=str(wanted))
    plain.step(), plain.step()
    done = finish(plain.fork(draft=str(GOLDEN / PAIR)))
    assert done["True"].metrics.drafts_proposed > 0 and done["True"].fallback is None
    assert done["False"].metrics.drafts_proposed == 0
    assert done["False"].fallback == "the request asked for no speculation"


def test_without_a_draft_nobody_falls_back():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[1], {**SAMPLING, "speculation": False}, request_id="a")
    served.step()
    assert finish(served.fork(draft=None))["a"].fallback is None


def test_a_fork_of_another_k_keeps_it_in_its_snapshot(tmp_path):
    twin = Engine.from_config(CONFIG).fork(k=3)
    twin.add_request(prompts(PAIR)[1], SAMPLING, request_id="a")
    twin.step(), twin.step()
    twin.snapshot(tmp_path / "snapshot")
    restored = Engine.restore(tmp_path / "snapshot")
    assert restored.k == 3
    assert record(finish(restored)["a"]) == record(finish(twin)["a"])


def test_a_fork_of_another_k_has_no_more_slots():
    served = engine(PAIR, slots=1)
    assert served.fork(k=2).host.policy.max_slots == 1


def test_threads_share_an_engine():
    served, done, errors = engine(PAIR), {}, []

    def work(name: str) -> None:
        try:
            for number in range(4):
                served.add_request(prompts(PAIR)[number], SHORT, request_id=f"{name}{number}")
            while served.has_work:
                for update in served.step():
                    if update.completion is not None:
                        assert update.id not in done
                        done[update.id] = update.completion
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert done.keys() == {f"{name}{number}" for name in "abc" for number in range(4)}
    for request_id, completion in done.items():
        assert completion.token_ids == alone(PAIR, tuple(prompts(PAIR)[int(request_id[1])])).token_ids[:4]


def test_threads_generate_side_by_side():
    served, done = engine(PAIR), {}

    def work(number: int) -> None:
        done[number] = served.generate([prompts(PAIR)[number]], SAMPLING)[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert record(done[number]) == record(alone(PAIR, tuple(prompts(PAIR)[number])))


@pytest.mark.parametrize("donate", [True, False])
def test_an_interruption_after_the_device_has_run_loses_nothing(donate, monkeypatch):
    served, join, calls = engine(PAIR, donate=donate), engine_module.join_updates, 0
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="a")

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls in (1, 4, 6):
            raise KeyboardInterrupt
        return join(*arguments)

    monkeypatch.setattr(engine_module, "join_updates", interrupted)
    tokens: list[int] = []
    while served.has_work:
        try:
            updates = served.step()
        except KeyboardInterrupt:
            continue
        for update in updates:
            tokens.extend(update.token_ids)
    assert tuple(tokens) == alone(PAIR, tuple(prompts(PAIR)[1])).token_ids


def test_a_deep_copy_goes_its_own_way():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="a")
    served.step(), served.step()
    twin = copy.deepcopy(served)
    assert record(finish(twin)["a"]) == record(finish(served)["a"])


def test_stop_strings_are_so_many_at_most():
    assert len(SamplingParams(stop=tuple("x" * (1 + n) for n in range(256))).stop) == 256
    with pytest.raises(RequestError, match=r"sampling\.stop has 1000000 strings; at most 256 are supported"):
        SamplingParams(stop=("x",) * 1_000_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", {"END": None}), ("stop", 5), ("stop", False), ("stop_token_ids", {}), ("stop_token_ids", "12")],
)
def test_stops_that_are_no_lists_are_refused(name, value):
    with pytest.raises(RequestError, match=rf"sampling\.{name} is .*; it must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("of", [np, jnp])
def test_numbers_of_numpy_and_jax_are_numbers(of):
    plain = SamplingParams(
        temperature=0.5, max_tokens=7, top_p=0.75, top_k=3, seed=9, stop_token_ids=(1, 2), ignore_eos=True
    )
    values = {"temperature": of.float32(0.5), "max_tokens": of.int32(7), "top_p": of.asarray(0.75, of.float32)}
    values |= {
        "top_k": of.uint8(3),
        "seed": of.uint32(9),
        "stop_token_ids": of.asarray([1, 2]),
        "ignore_eos": of.bool_(True),
    }
    for params in (SamplingParams(**values), SamplingParams().override(values)):
        assert params == plain
        for field in dataclasses.fields(params):
            found, expected = getattr(params, field.name), getattr(plain, field.name)
            assert type(found) is type(expected), field.name
    assert SamplingParams(stop_token_ids=[of.int32(3)]).stop_token_ids == (3,)
    for name, value in (("temperature", of.float32("nan")), ("max_tokens", of.float32(2)), ("top_k", of.asarray([1]))):
        with pytest.raises(RequestError, match=f"^sampling.{name} is "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("of", [np, jnp])
def test_a_prompt_may_be_an_array(of):
    served, prompt = engine("recall-dflash2"), prompts("recall-dflash2")[0]
    assert served.tokenize(of.asarray(prompt)) == tuple(prompt)
    with pytest.raises(RequestError, match=r"the prompt is .*; it must be text, a list of token ids"):
        served.tokenize(of.asarray([prompt]))
    with pytest.raises(RequestError, match=r"the prompt is .*; it must be text, a list of token ids"):
        served.tokenize(of.asarray(prompt, of.float32))
