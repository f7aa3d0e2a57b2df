"""OpenAI's batch output: answers in one file, errors in another.

https://platform.openai.com/docs/api-reference/batch/request-output
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.jobs.formats.openai_input import CHAT
from dflash_jax.jobs.ledger import Result, is_refusal
from dflash_jax.jobs.writer import MAX_RESULT, ResultFile, read_results

_OWN = "dflash_jax"
"""The key of a response's body under which its result is."""

_BAD_REQUEST, _SERVER_ERROR = 400, 500


def errors_path(output: str | Path) -> Path:
    """Where the errors of an output are: `out.jsonl` -> `out.jsonl.errors.jsonl`."""
    output = Path(output)
    return output.with_name(output.name + ".errors.jsonl")


class OpenAIResults:
    """An output in OpenAI's form, open for this job alone."""

    def __init__(self, path: str | Path):
        """Opens or creates both files.

        Raises:
          ConfigError: another job has them, they are something else, or they cannot be written.
        """
        with contextlib.ExitStack() as stack:
            self._answers = stack.enter_context(ResultFile(path, to_line, from_line))
            self._errors = stack.enter_context(ResultFile(errors_path(path), to_line, from_line))
            self._files = stack.pop_all()

    def __enter__(self) -> OpenAIResults:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def has(self, item_id: str | int) -> bool:
        """Whether the answer to a request is there, or the error that came of running it."""
        return self._answers.has(item_id) or self._errors.has(item_id)

    @property
    def answers(self) -> int:
        """How many requests were run."""
        return self._answers.answers + self._errors.answers

    def write(self, result: Result) -> None:
        """Adds a line to one of the files."""
        (self._errors if result["finish_reason"] == "error" else self._answers).write(result)

    def clear(self) -> None:
        """Forgets all results."""
        self._answers.clear()
        self._errors.clear()

    def keep_refusals(self, ids: Collection[str]) -> None:
        """Removes errors of requests that can be run by now."""
        self._errors.keep_refusals(ids)

    def results(self) -> Iterator[Result]:
        """All results."""
        yield from itertools.chain(self._answers.results(), self._errors.results())


def is_openai_output(path: Path) -> bool:
    """Whether the first line of a file is of this form."""
    try:
        with path.open("rb") as file:
            return from_line(json.loads(file.readline(MAX_RESULT))) is not None
    except (OSError, ValueError, RecursionError):
        return False


def read_openai_results(path: Path) -> Iterator[Result]:
    """The results in both files of an output."""
    for file in (path, errors_path(path)):
        yield from read_results(file, from_line)


def to_line(result: Result) -> dict[str, Any]:
    """A result as a line of one of the files."""
    name = hashlib.sha256(str(result["id"]).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    status = 200 if result["finish_reason"] != "error" else _BAD_REQUEST if is_refusal(result) else _SERVER_ERROR
    body = _answer(result, name) if status == 200 else {"error": _error(result, status)}
    # What the rest of the body does not say.
    own = {key: value for key, value in result.items() if key not in ("id", "text") or value is None}
    if isinstance(result["id"], int):
        own["id"] = result["id"]
    return {
        "id": f"batch_req_{name}",
        "custom_id": str(result["id"]),
        "response": {"status_code": status, "request_id": f"req_{name}", "body": {**body, _OWN: own}},
        "error": None,
    }


def from_line(line: Any) -> Result | None:
    """The result that a line was made of; None if it was made of none."""
    try:
        body = line["response"]["body"]
        found = {"id": line["custom_id"], **body[_OWN]}
        if "text" not in found and "choices" in body:
            choice = body["choices"][0]
            found["text"] = choice["text"] if "text" in choice else choice["message"]["content"]
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    return found


def _answer(result: Result, name: str) -> dict[str, Any]:
    asked = result.get("request") or {}
    chat = asked.get("url", CHAT) == CHAT
    samples = result.get("samples") or [result]
    metrics = result.get("metrics") or {}
    produced = sum(len(sample["token_ids"]) for sample in samples)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": asked.get("model", _OWN),
        "choices": [_choice(sample, index, chat) for index, sample in enumerate(samples)],
        "usage": {
            "prompt_tokens": result["prompt_tokens"],
            "completion_tokens": produced,
            "total_tokens": result["prompt_tokens"] + produced,
            "prompt_tokens_details": {"cached_tokens": metrics.get("cached_tokens") or 0},
        },
    }


def _choice(sample: Result, index: int, chat: bool) -> dict[str, Any]:
    reason = sample["finish_reason"] if sample["finish_reason"] in ("stop", "length") else "stop"
    found = sample.get("logprobs")
    choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
    if found is not None:
        choice["logprobs"] = _chat_logprobs(found) if chat else _completion_logprobs(found)
    if chat:
        return {**choice, "message": {"role": "assistant", "content": sample["text"], "refusal": None}}
    return {**choice, "text": sample["text"] or ""}


def _chat_logprobs(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = [{**_logprob(each), "top_logprobs": [_logprob(other) for other in each["top"]]} for each in found]
    return {"content": content, "refusal": None}


def _completion_logprobs(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    records = [_logprob(each) for each in found]
    tokens = [each["token"] for each in records]
    ends = itertools.accumulate(map(len, tokens), initial=0)
    return {
        "tokens": tokens,
        "token_logprobs": [each["logprob"] for each in records],
        "top_logprobs": [{other["token"]: other["logprob"] for other in map(_logprob, each["top"])} for each in found],
        "text_offset": [start for start, _ in zip(ends, tokens, strict=False)],
    }


def _logprob(record: Mapping[str, Any]) -> dict[str, Any]:
    text = record["text"] if record["text"] is not None else f"token_id:{record['token_id']}"
    logprob = _NO_CHANCE if record["logprob"] is None else record["logprob"]
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "surrogatepass"))}


_NO_CHANCE = -9999.0
"""What OpenAI has in the place of minus infinity."""


def _error(result: Result, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status == _BAD_REQUEST else "server_error"
    return {"message": result["error"], "type": kind, "param": None, "code": None}
