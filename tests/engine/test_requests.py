"""What is asked of an engine and cannot be done is refused at once, in a sentence."""

from __future__ import annotations

import pytest

from dflash_jax import ConfigError, Engine, EngineConfig, RequestError, SamplingParams
from tests.pairs import GOLDEN, SIZES, engine, models, prompts

PAIR = "recall-dflash2"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([60, 64], "prompt token 64 is outside the vocabulary of 64 tokens"),
        ([60, -1], "prompt token -1 is outside"),
        ([60, 1.5], r"the prompt is \[60, 1.5\]; it must be text, a list of token ids, or a list of messages"),
        ([60, "a"], "it must be text, a list of token ids"),
        (7, "the prompt is 7; it must be"),
        (None, "the prompt is None; it must be"),
        ("hello", "the prompt is text, but the model has no tokenizer"),
        ([{"role": "user", "content": "hello"}], "the prompt is text, but the model has no tokenizer"),
        ([1] * 160, "leaves no room to answer"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(prompt, message):
    served = engine(PAIR)
    with pytest.raises(RequestError, match=message):
        served.add_request(prompt)
    assert not served.has_work


@pytest.mark.parametrize("prompts_", [7, None, b"hello", 1.5])
def test_what_is_no_prompt_and_holds_none_is_refused(prompts_):
    with pytest.raises(RequestError, match=r"it must be a prompt .* or several"):
        engine(PAIR).generate(prompts_)


def test_a_bad_prompt_among_good_ones_leaves_nothing_behind():
    served = engine(PAIR)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        served.generate([prompts(PAIR)[0], [99]])
    assert not served.has_work


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1}, "sampling.temperature is -1; it must be 0 or more"),
        ({"temperature": float("nan")}, "sampling.temperature is nan"),
        ({"max_tokens": 0}, "sampling.max_tokens is 0"),
        ({"top_p": 0}, "sampling.top_p is 0; it must be above 0 and at most 1"),
        ({"top_k": -1}, "sampling.top_k is -1"),
        ({"min_p": 2}, "sampling.min_p is 2"),
        ({"seed": 2**32}, "sampling.seed is 4294967296"),
        ({"stop": [""]}, "none of them empty"),
        ({"stop": ["x"]}, "stop strings need a tokenizer"),
        ({"stop_token_ids": [64]}, "stop token 64 is outside the vocabulary of 64 tokens"),
        ({"stop_token_ids": list(range(9))}, "at most 8 are supported"),
        ({"temprature": 1}, "unknown sampling key 'temprature'; the nearest known one is 'temperature'"),
        ({"ignore_eos": 1}, "it must be true or false"),
        (7, "sampling is 7; it must be a mapping"),
    ],
)
def test_sampling_that_means_nothing_is_refused(sampling, message):
    with pytest.raises(RequestError, match=message):
        engine(PAIR).add_request([60, 1], sampling)


def test_an_id_in_flight_cannot_be_used_twice():
    served = engine(PAIR)
    served.add_request([60, 1], request_id="same")
    with pytest.raises(RequestError, match="request id 'same' is in flight already"):
        served.add_request([60, 2], request_id="same")


def test_sizes_that_do_not_fit_the_models_are_refused():
    with pytest.raises(ConfigError, match=r"draft\.k is 160; it must be below engine\.max_model_len 160"):
        engine(PAIR, k=160)
    with pytest.raises(ConfigError, match="max_model_len is 5000, but the target was made for at most 4096 tokens"):
        Engine(models(None), EngineConfig(max_model_len=5000))
    with pytest.raises(ConfigError, match=r"draft\.k is 3, but there is no draft"):
        engine(None, k=3)


def test_a_jobs_config_makes_an_engine(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        f"target: {{path: {GOLDEN / 'recall-target'}}}\nengine: {SIZES}\n"
        "input: {path: in.jsonl}\noutput: {path: out.jsonl}\nsampling: {max_tokens: 3}\n".replace("True", "true")
    )
    assert Engine.from_config(file).config == EngineConfig(**SIZES)


def test_what_a_request_may_produce_is_what_the_model_length_leaves():
    served = engine(PAIR)
    served.add_request([60] * 150, SamplingParams(max_tokens=10**9))
    assert served.host.waiting.first.request.limit == 10
