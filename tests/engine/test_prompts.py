"""Whatever form prompts and parameters are typed in, they are the same request."""

from __future__ import annotations

import asyncio
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, RequestError, SamplingParams
from dflash_jax.engine.prompts import read_prompts
from tests.byte_tokenizer import byte_tokenizer
from tests.pairs import alone, engine, models, prompts

PAIR = "recall-dflash2"
SHORT = {"max_tokens": 8, "ignore_eos": True}
IDS = [60, 25, 23, 0]
CHAT = [{"role": "user", "content": "x"}]


def asked(prompts_, sampling=None, **parameters):
    return [(one.prompt, one.sampling) for one in read_prompts(prompts_, sampling, parameters)]


@pytest.mark.parametrize(
    "one",
    [IDS, tuple(IDS), np.array(IDS), jnp.array(IDS), range(4), [np.int32(token) for token in IDS]],
    ids=["list", "tuple", "numpy", "jax", "range", "list of numpy"],
)
def test_token_ids_in_any_form_are_one_prompt(one):
    [(prompt, _)] = asked(one)
    assert list(prompt) == (list(range(4)) if isinstance(one, range) else IDS)


@pytest.mark.parametrize(
    "one",
    [
        "hello",
        {"prompt": "hello"},
        [{"role": "user", "content": "x"}],
        {"messages": [{"role": "user", "content": "x"}]},
    ],
    ids=["text", "mapping", "chat", "mapping of a chat"],
)
def test_a_single_prompt_needs_no_list(one):
    assert len(asked(one)) == 1
    assert asked(one) == asked([one]) == asked(iter([one]))


def test_many_prompts_may_come_in_anything_that_holds_them():
    pair = [IDS, IDS[::-1]]
    for many in (pair, tuple(pair), iter(pair), (each for each in pair), np.array(pair)):
        assert [list(prompt) for prompt, _ in asked(many)] == pair
    assert [prompt for prompt, _ in asked(np.array(["a", "b"]))] == ["a", "b"]
    assert asked([]) == asked(iter(())) == []


def test_parameters_may_be_typed_in_any_form():
    wanted = SamplingParams(temperature=0.5, max_tokens=8)
    assert asked("a", wanted) == asked("a", {"temperature": 0.5, "max_tokens": 8}) == [("a", wanted)]
    assert asked("a", temperature=0.5, max_tokens=8) == asked("a", {"temperature": 0.1}, temperature=0.5, max_tokens=8)
    assert asked(["a", "b"], [wanted, {"seed": 3}], seed=4) == [
        ("a", SamplingParams(temperature=0.5, max_tokens=8, seed=4)),
        ("b", SamplingParams(seed=4)),
    ]
    # A prompt's own parameters are nearest to it.
    mapping = {"id": 7, "prompt": "a", "sampling": {"seed": 9}}
    [one] = read_prompts(mapping, {"seed": 3, "top_k": 2}, {"seed": 4})
    assert (one.prompt, one.sampling, one.request_id) == ("a", SamplingParams(top_k=2, seed=9), "7")


@pytest.mark.parametrize(
    ("prompts_", "sampling", "parameters", "message"),
    [
        (["a"], [{}, {}], {}, "for 1 prompts it must be a SamplingParams or a mapping, or a list of 1 of these"),
        (["a"], "hot", {}, "sampling is 'hot'; for 1 prompts"),
        (["a"], None, {"temprature": 1}, "unknown sampling key 'temprature'"),
        (np.zeros((1, 2, 2), int), None, {}, r"an array of shape \(1, 2, 2\); it must have a row of token ids"),
        (np.array(3), None, {}, r"an array of shape \(\); it must have a row"),
        ({"prompt": "a", "messages": []}, None, {}, "the prompt has prompt and messages; it must have one of them"),
        ({"text": "a"}, None, {}, "a mapping of 'text'; it must have one of prompt, messages and prompt_token_ids"),
        ({"prompt": "a", "tools": []}, None, {}, "the key 'tools' beside prompt; it goes with messages"),
        ({"prompt": "a", "x": 1}, None, {}, "the key 'x' beside prompt; it may have id and sampling"),
        ({"prompt": [1]}, None, {}, r"prompt is \[1\]; it must be a string"),
        ({"prompt_token_ids": "a"}, None, {}, "prompt_token_ids is 'a'; it must be a list of token ids"),
        ({"prompt": "a", "id": 1.5}, None, {}, "the prompt's id is 1.5; it must be a string or an integer"),
        ({"prompt": "a", "sampling": {"top_p": 7}}, None, {}, "sampling.top_p is 7"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_sentence(prompts_, sampling, parameters, message):
    with pytest.raises(RequestError, match=message):
        read_prompts(prompts_, sampling, parameters)


def test_all_forms_are_answered_alike():
    served, prompt = engine(PAIR), prompts(PAIR)[0]
    want = alone(PAIR, tuple(prompt), tuple(SHORT.items())).token_ids
    forms = [prompt, np.array(prompt), np.array([prompt]), {"prompt_token_ids": prompt}, [prompt], iter([prompt])]
    for form in forms:
        [completion] = served.generate(form, **SHORT)
        assert completion.token_ids == want
    name = served.add_request({"id": "mine", "prompt_token_ids": prompt}, SHORT, max_tokens=2)
    assert name == "mine" and served.host.waiting.first.request.limit == 2
    served.abort(name)
    text = Engine(models(PAIR), served.config, tokenizer=byte_tokenizer())
    [a], [b] = text.generate("!#", **SHORT), text.generate({"prompt": "!#"}, **SHORT)
    assert a.token_ids == b.token_ids and text.tokenize({"prompt": "!#"}) == text.tokenize("!#")


def test_progress_shows_finished_answers_and_changes_nothing(capsys):
    plain = engine(PAIR).generate(prompts(PAIR)[:2], SHORT)
    shown = engine(PAIR).generate(prompts(PAIR)[:2], SHORT, progress=True)
    assert [one.token_ids for one in shown] == [one.token_ids for one in plain]
    assert capsys.readouterr().out == ""


def test_an_asynchronous_stream_brings_what_generate_does():
    served, two = engine(PAIR), prompts(PAIR)[:2]

    async def collect(prompt):
        return [update async for update in served.stream_async(prompt, **SHORT)]

    async def both():
        return await asyncio.gather(*map(collect, two))

    for updates, prompt in zip(asyncio.run(both()), two, strict=True):
        want = alone(PAIR, tuple(prompt), tuple(SHORT.items())).token_ids
        assert sum((update.token_ids for update in updates), ()) == want == updates[-1].completion.token_ids
    assert not served.has_work


def test_the_event_loop_goes_on_while_a_step_runs(monkeypatch):
    served = engine(PAIR)
    advance, threads = served._advance, set()

    def slow():
        threads.add(threading.current_thread())
        time.sleep(0.2)
        advance()

    monkeypatch.setattr(served, "_advance", slow)

    async def ticks() -> int:
        stream = asyncio.create_task(anext(served.stream_async(prompts(PAIR)[0], **SHORT)))
        count = 0
        while not stream.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    assert asyncio.run(ticks()) >= 3
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_stream_that_is_left_aborts_its_requests_and_no_others(way):
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[1], SHORT, request_id="other")

    async def leave():
        stream = served.stream_async(prompts(PAIR)[0], max_tokens=100, ignore_eos=True, n=2, temperature=1.0)
        if way == "close":
            await anext(stream)
            await stream.aclose()
            return
        seen = asyncio.Event()

        async def read():
            async for _ in stream:
                seen.set()

        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    left = {sequence.id for sequence in served.host.in_flight} | {update.id for update in served.host.undelivered}
    assert left == {"other"}


def test_an_asynchronous_stream_raises_what_cannot_be_asked():
    async def first():
        await anext(engine(PAIR).stream_async([[99]]))

    with pytest.raises(RequestError, match="outside the vocabulary"):
        asyncio.run(first())
