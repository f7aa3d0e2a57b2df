"""OpenAI's batch files, in and out, held against the official package's types."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from dflash_jax.engine.request import SamplingParams
from dflash_jax.jobs.config import InputFile
from dflash_jax.jobs.formats.openai_input import CHAT
from dflash_jax.jobs.formats.openai_output import errors_path, from_line, to_line
from dflash_jax.jobs.reader import BadLine, read_items
from tests.jobs.recall_job import CASES


def request(custom_id, url="/v1/completions", method="POST", **body):
    body = {"model": "recall", **body}
    if url == "/v1/completions":
        body.setdefault("prompt", CASES[0]["prompt"])
    else:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


@pytest.fixture
def read(tmp_path):
    def read(*requests):
        path = tmp_path / "batch.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in requests))
        return list(read_items(InputFile(path=str(path)), SamplingParams(max_tokens=7)))

    return read


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_batch_is_answered_in_the_official_packages_types(job):
    job.prompts(
        request("a", max_tokens=12),
        request("b", prompt=[CASES[1]["prompt"]], temperature=0.7, seed=3),
        request("c", max_tokens=12, suffix="x"),
    )
    job.run()
    answers, errors = lines(job.output), lines(errors_path(job.output))
    assert [line["custom_id"] for line in answers] == ["a", "b"] and [line["custom_id"] for line in errors] == ["c"]
    for line in answers:
        assert set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None
        assert line["response"]["status_code"] == 200
        body = Completion.model_validate(line["response"]["body"])
        prompt = CASES[0 if line["custom_id"] == "a" else 1]["prompt"]
        assert body.model == "recall" and body.usage.prompt_tokens == len(prompt)
        assert body.choices[0].finish_reason in ("stop", "length")
        own = line["response"]["body"]["dflash_jax"]
        assert len(own["token_ids"]) == body.usage.completion_tokens and "accept_rate" in own["metrics"]
    [error] = errors
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert "suffix is 'x'" in error["response"]["body"]["error"]["message"]


def test_a_batch_gets_the_tokens_that_lines_of_this_package_get(job):
    job.run()
    whole = {row["id"]: row["token_ids"] for row in job.rows()}
    job.output.unlink()
    (job.directory / "out.jsonl.summary.json").unlink()
    job.prompts(*(request(f"case-{n}", prompt=case["prompt"]) for n, case in enumerate(CASES)))
    job.run()
    assert {
        line["custom_id"]: line["response"]["body"]["dflash_jax"]["token_ids"] for line in lines(job.output)
    } == whole


def test_several_samples_are_several_choices(job):
    job.prompts(request("a", n=2, temperature=1.0, seed=3, max_tokens=8))
    job.run()
    [line] = lines(job.output)
    body = Completion.model_validate(line["response"]["body"])
    assert [choice.index for choice in body.choices] == [0, 1] and body.usage.completion_tokens == 16


def test_a_batch_that_is_run_again_does_only_what_is_missing(job):
    job.prompts(request("a"), request("bad", stream=True), request("b"))
    job.run()
    before = job.output.read_bytes()
    job.prompts(request("a"), request("bad"), request("b"), request("c"))
    summary = job.run()
    assert job.output.read_bytes().startswith(before)
    assert sorted(line["custom_id"] for line in lines(job.output)) == ["a", "b", "bad", "c"]
    assert lines(errors_path(job.output)) == []
    assert summary["requests"]["total"] == 4 and summary["runs"][-1]["requests"] == 2
    assert summary["drafted_request_steps"] > 0


def test_a_chat_answer_is_a_chat_completion():
    result = {
        "id": "x",
        "token_ids": [1, 2],
        "text": "hello",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "metrics": {"cached_tokens": 1},
        "fallback": None,
        "request": {"url": "/v1/chat/completions", "model": "m"},
    }
    line = json.loads(json.dumps(to_line(result)))
    body = ChatCompletion.model_validate(line["response"]["body"])
    assert body.choices[0].message.content == "hello" and body.usage.total_tokens == 5 and body.model == "m"
    assert from_line(line) == result


@pytest.mark.parametrize("item_id", ["x", 7])
@pytest.mark.parametrize("text", ["", "hello", None])
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_every_result_is_read_back_as_it_was_written(item_id, text, url):
    result = {
        "id": item_id,
        "token_ids": [5],
        "text": text,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "metrics": {"ttft_s": 0.5},
        "fallback": "why",
        "trace": {"produced_per_round": [1]},
        "request": {"url": url, "model": "m"},
    }
    failed = {**result, "finish_reason": "error", "error": "it broke", "text": None}
    refused = {**failed, "line": 4}
    for each in (result, failed, refused):
        assert from_line(json.loads(json.dumps(to_line(each)))) == each
    assert [to_line(each)["response"]["status_code"] for each in (result, failed, refused)] == [200, 500, 400]


def test_parameters_of_the_body_are_those_of_sampling(read):
    [item] = read(
        request(
            "a",
            "/v1/chat/completions",
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=3,
            seed=4,
            stop=["x"],
            top_k=5,
            user="me",
            metadata={"a": "b"},
            n=1,
            stream=False,
            response_format={"type": "text"},
            logprobs=False,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    )
    assert item.sampling == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=3, seed=4, stop=("x",), top_k=5)
    assert set(item.prompt) == {"messages", "tools"}
    assert item.request == {"url": "/v1/chat/completions", "model": "recall"}


def test_formats_biases_and_log_probabilities_of_the_body_are_those_of_sampling(read):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = [
        {"response_format": {"type": "json_object"}, "logprobs": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"logit_bias": {"7": -100, "9": 5}, "frequency_penalty": 0.5, "logprobs": True, "top_logprobs": 3},
    ]
    found = [item.sampling for item in read(*(request(str(n), CHAT, **each) for n, each in enumerate(asked)))]
    expected = [
        {"structured_outputs": {"json": {"type": "object"}}, "logprobs": 0},
        {"structured_outputs": {"json": schema}},
        {"logit_bias": {7: -100, 9: 5}, "frequency_penalty": 0.5, "logprobs": 3},
    ]
    assert found == [SamplingParams(max_tokens=7).override(each) for each in expected]
    [completion] = read(request("c", logprobs=2))
    assert completion.sampling.logprobs == 2


@pytest.mark.parametrize("url", [CHAT, "/v1/completions"])
def test_log_probabilities_have_the_official_packages_types(url):
    top = [{"token_id": 7, "text": " a", "logprob": -0.5}, {"token_id": 8, "text": "\u00e9", "logprob": None}]
    record = {"token_id": 7, "text": " a", "logprob": -0.5, "rank": 1, "top": top}
    result = {
        "id": "a",
        "prompt_tokens": 3,
        "token_ids": [7, 7],
        "text": " a a",
        "finish_reason": "length",
        "error": None,
        "metrics": {},
        "logprobs": [record, {**record, "top": []}],
        "request": {"url": url, "model": "m"},
    }
    body = to_line(result)["response"]["body"]
    if url == CHAT:
        [first, second] = ChatCompletion.model_validate(body).choices[0].logprobs.content
        assert (first.token, first.logprob, first.bytes) == (" a", -0.5, [32, 97]) and second.top_logprobs == []
        assert [(one.token, one.logprob) for one in first.top_logprobs] == [(" a", -0.5), ("\u00e9", -9999.0)]
    else:
        found = Completion.model_validate(body).choices[0].logprobs
        assert (found.tokens, found.token_logprobs, found.text_offset) == ([" a", " a"], [-0.5, -0.5], [0, 2])
        assert found.top_logprobs == [{" a": -0.5, "\u00e9": -9999.0}, {}]
    assert from_line(json.loads(json.dumps(to_line(result)))) == result


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 0}, "sampling.n is 0"),
        ({"best_of": 2}, "body.best_of is 2, which is not supported; leave it out, or give 1"),
        ({"logprobs": 3}, "body.logprobs is 3; in a chat it must be true or false"),
        ({"top_logprobs": 3}, "body.top_logprobs is 3; it needs body.logprobs true"),
        ({"logprobs": True, "top_logprobs": 99}, "sampling.logprobs is 99"),
        ({"stream": True}, "body.stream is True"),
        ({"response_format": {"type": "grammar"}}, "body.response_format is {'type': 'grammar'}; its type must be"),
        ({"response_format": {"type": "json_schema"}}, "the last with json_schema.schema"),
        ({"response_format": "json"}, "body.response_format is 'json'; its type must be"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "body.response_format and body.structured_outputs both say",
        ),
        ({"tool_choice": "required"}, "body.tool_choice is 'required'"),
        ({"functions": [{"name": "f"}]}, "body.functions is not supported"),
        ({"reasoning_effort": "high"}, "body.reasoning_effort is not supported"),
        ({"temprature": 1}, "body.temprature is not supported; the nearest known one is 'temperature'"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "they mean the same"),
        ({"max_tokens": 0}, "sampling.max_tokens is 0"),
        ({"temperature": -1}, "sampling.temperature is -1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages is 'hi'"),
        ({"model": None}, "body.model is None"),
        ({"prompt": "x"}, "body.prompt is not supported"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_that_line_and_never_passed_over(read, body, said):
    bad, good = read(request("bad", "/v1/chat/completions", **body), request("good", "/v1/chat/completions"))
    assert isinstance(bad, BadLine) and bad.id == "bad" and said in bad.error
    assert good.id == "good"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (request("x", "/v1/embeddings"), "url is '/v1/embeddings'; it must be '/v1/chat/completions' or"),
        (request("x", method="GET"), "method is 'GET'; it must be 'POST'"),
        ({**request("x"), "body": "hi"}, "body is 'hi'; it must be an object"),
        ({**request("x"), "prompt": "hi"}, "unknown key 'prompt'"),
        (request("x", prompt=["a", "b"]), "body.prompt has 2 prompts"),
        (request("x", prompt=[]), "prompt_token_ids is empty"),
        (request("x", echo=True), "body.echo is True"),
        (request("x", best_of=3), "body.best_of is 3"),
    ],
)
def test_lines_that_are_no_requests_are_errors(read, line, said):
    first, bad = read(request("first"), line)
    assert first.id == "first" and isinstance(bad, BadLine) and bad.id == "x" and said in bad.error


def test_ids_are_strings_and_unique(read):
    _, again, number, none = read(request("a"), request("a"), request(7), request(None))
    assert "already that of line 1" in again.error
    assert "custom_id is 7; it must be a string" in number.error
    assert "custom_id is None" in none.error or "'line-4'" in none.error
