"""OpenAI's batch input: a request to its API on each line.

https://platform.openai.com/docs/api-reference/batch/request-input
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import RequestError, quote
from dflash_jax.jobs.formats.base import Record
from dflash_jax.jobs.formats.jsonl import JsonLines
from dflash_jax.settings import suggest
from dflash_jax.text.chat import CHAT_KEYS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_KEYS = ("custom_id", "method", "url", "body")

_KEYS_OF = {
    CHAT: (*CHAT_KEYS, "max_completion_tokens", "logprobs", "top_logprobs", "response_format"),
    COMPLETIONS: ("prompt", "logprobs"),
}
"""Parameters that are read here."""

_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "logprobs")
"""Sampling parameters that go by the same name in a body: OpenAI's, and those that other engines have beside them."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "verbosity": ("medium",),
}
"""Parameters of OpenAI's that are not supported, with the values at which they ask for nothing."""

_IGNORED = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "stream_options",
)
"""What says nothing about the answer."""


def is_batch_request(record: Mapping[str, Any]) -> bool:
    """Whether an object on a line is such a request rather than a line of this package's own."""
    return "custom_id" in record and "body" in record


class OpenAIRequests(JsonLines):
    """A reader of OpenAI's batch input."""

    adds_request = True

    def record(self, row: bytes | None) -> Record:
        """The object on a line, with its custom id as the id."""
        found = super().record(row)
        return {**found, "id": found.get("custom_id")}

    def request(self, record: Record) -> Record:
        """What the line asks for, in the keys of this package; what cannot be done is refused."""
        if not isinstance(record["id"], str):
            raise RequestError(f"custom_id is {quote(record['id'])}; it must be a string")
        for key, value in record.items():
            if key not in (*_KEYS, "id") and value is not None:
                raise RequestError(f"unknown key {quote(key)}; {suggest(key, _KEYS)}")
        if record.get("method") != "POST":
            raise RequestError(f"method is {quote(record.get('method'))}; it must be 'POST'")
        url, body = record.get("url"), record.get("body")
        if url not in _KEYS_OF:
            raise RequestError(f"url is {quote(url)}; it must be {CHAT!r} or {COMPLETIONS!r}")
        if not isinstance(body, dict):
            raise RequestError(f"body is {quote(body)}; it must be an object")
        given = {key: value for key, value in body.items() if value is not None}
        model = given.get("model")
        if not isinstance(model, str):
            raise RequestError(f"body.model is {quote(model)}; it must be a string, and is handed on to the answer")
        _check_body(given, url)
        sampling = {name: given[name] for name in _SAMPLING if name in given}
        _add_limit(sampling, given)
        _add_logprobs(sampling, given, url)
        _add_format(sampling, given)
        prompt = {name: given[name] for name in CHAT_KEYS if name in given} if url == CHAT else _prompt(given)
        return {**prompt, "sampling": sampling, "request": {"url": url, "model": model}}


def _check_body(given: Mapping[str, Any], url: str) -> None:
    known = (*_KEYS_OF[url], *_SAMPLING)
    for name, value in given.items():
        if name in known or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise RequestError(f"body.{_named(name)} is not supported; {suggest(name, (*known, *_IGNORED, *_NEUTRAL))}")
        if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            neutral = " or ".join(map(repr, _NEUTRAL[name]))
            raise RequestError(
                f"body.{name} is {quote(value)}, which is not supported; leave it out, or give {neutral}"
            )


def _named(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 64 else quote(name, 64)


def _same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are equal; numbers are no truth values."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _add_limit(sampling: dict[str, Any], given: Mapping[str, Any]) -> None:
    limit = given.get("max_completion_tokens")
    if limit is None:
        return
    if "max_tokens" in sampling and sampling["max_tokens"] != limit:
        raise RequestError(
            f"body.max_tokens is {quote(sampling['max_tokens'])} and body.max_completion_tokens {quote(limit)}; "
            "they mean the same, so give one of them"
        )
    sampling["max_tokens"] = limit


def _add_logprobs(sampling: dict[str, Any], given: Mapping[str, Any], url: str) -> None:
    """Log-probabilities: in a chat with `top_logprobs` others, if asked for; else with as many as `logprobs` says."""
    asked, top = given.get("logprobs"), given.get("top_logprobs", 0)
    if url == COMPLETIONS:
        sampling["logprobs"] = asked
        return
    if asked not in (None, True, False) or not isinstance(asked, bool | None):
        raise RequestError(f"body.logprobs is {quote(asked)}; in a chat it must be true or false")
    if top and not asked:
        raise RequestError(f"body.top_logprobs is {quote(top)}; it needs body.logprobs true")
    sampling["logprobs"] = top if asked else None


def _add_format(sampling: dict[str, Any], given: Mapping[str, Any]) -> None:
    """A response format, as structured outputs."""
    asked = given.get("response_format")
    if asked is None:
        return
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "text":
        return
    schema = {"type": "object"} if kind == "json_object" else _schema(asked) if kind == "json_schema" else None
    if schema is None:
        raise RequestError(
            f"body.response_format is {quote(asked)}; its type must be 'text', 'json_object' or 'json_schema', "
            "the last with json_schema.schema"
        )
    if sampling.get("structured_outputs") is not None:
        raise RequestError("body.response_format and body.structured_outputs both say what the answer must be")
    sampling["structured_outputs"] = {"json": schema}


def _schema(asked: Mapping[str, Any]) -> Any:
    named = asked.get("json_schema")
    return named.get("schema") if isinstance(named, dict) else None


def _prompt(given: Mapping[str, Any]) -> Record:
    """The prompt of a completion: text, token ids, or a list of one of these."""
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RequestError(f"body.prompt has {len(prompt)} prompts; give each a line of its own")
        prompt = prompt[0]
    return {"prompt_token_ids" if isinstance(prompt, list) else "prompt": prompt}
