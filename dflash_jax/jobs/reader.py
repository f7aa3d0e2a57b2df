"""The job's input: lines to prompts, or to what is wrong with them."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dflash_jax.engine.engine import Prompt
from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.text.chat import CHAT_KEYS, read_chat

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_KEYS = ("id", *PROMPT_KEYS, *CHAT_KEYS[1:], "sampling")

MAX_LINE = 1 << 24
"""Bytes of the longest line that is read."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A prompt.

    Attributes:
      line: its line in the input, from 1.
      id: as the line gives it, a string or an integer; `line-N` if it gives none.
      prompt: text, token ids, messages, or a mapping of messages and what else the line says for the chat template.
      sampling: the job's parameters with the line's own on top.
    """

    line: int
    id: str | int
    prompt: Prompt
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that is no prompt. Its id is its own if it could be read and is nobody else's, else `line-N`."""

    line: int
    id: str | int
    error: str


def count_lines(path: str | Path) -> int:
    """How many lines `read_items` will yield.

    Raises:
      ConfigError: the file cannot be read.
    """
    with _open(path) as file:
        return sum(1 for _ in _lines(file))


def read_items(path: str | Path, defaults: SamplingParams, key: str = "input.path") -> Iterator[Item | BadLine]:
    """Reads an input file; blank lines are passed over. Ids are unique, 7 and "7" being the same.

    Args:
      path: the file.
      defaults: of sampling.
      key: the setting that names the file.

    Raises:
      ConfigError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    with _open(path, key) as file:
        for number, raw in _lines(file):
            made = f"line-{number}"
            while made in seen:
                made += "'"
            item = _read(number, raw, made, defaults)
            earlier = seen.get(str(item.id))
            if earlier is not None:
                item = BadLine(
                    number, made, f"the id {item.id!r} is already that of line {earlier}; ids must be unique"
                )
            seen[str(item.id)] = number
            yield item


_SPACE = b" \t\r\n\x0b\x0c"
_BOM = b"\xef\xbb\xbf"


def _open(path: str | Path, key: str = "input.path") -> BinaryIO:
    try:
        return Path(path).open("rb")
    except FileNotFoundError:
        raise ConfigError(f"there is no input file {str(path)!r} ({key})") from None
    except OSError as error:
        raise ConfigError(f"the input file {str(path)!r} ({key}) cannot be read ({error.strerror})") from None


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines that are not blank; None in place of one that is too long."""
    number = 0
    while piece := file.readline(MAX_LINE):
        number += 1
        if piece.endswith(b"\n") or len(piece) < MAX_LINE:
            if number == 1:
                piece = piece.removeprefix(_BOM)
            if piece := piece.strip(_SPACE):
                yield number, piece
            continue
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE)
        yield number, None


def _read(number: int, raw: bytes | None, made: str, defaults: SamplingParams) -> Item | BadLine:
    item_id: str | int = made
    try:
        record = _parse(raw)
        given = record.get("id")
        if given is not None:
            if not isinstance(given, str | int) or isinstance(given, bool) or given == "":
                raise RequestError(f"id is {_short(given)}; it must be a string or an integer")
            item_id = given
        _check_keys(record)
        prompt = _prompt(record)
        own = record.get("sampling")
        sampling = defaults if own is None else defaults.override(own)
    except RequestError as error:
        return BadLine(number, item_id, str(error))
    return Item(number, item_id, prompt, sampling)


def _parse(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        raise RequestError(f"the line is longer than {MAX_LINE >> 20} MiB")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not UTF-8 (byte {error.start})") from None
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestError(f"the line is not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise RequestError(f"the line is {_short(record)}; it must be an object with a prompt")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the line has half of a surrogate pair in a string, which is no character") from None
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _check_keys(record: dict[str, Any]) -> None:
    """Refuses keys that look like a slip of the pen; what else a line carries is the user's business."""
    for key in record:
        near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.85)
        if near and near[0] != key:
            raise RequestError(f"unknown key {key!r}; the nearest known one is {near[0]!r}")


def _prompt(record: dict[str, Any]) -> Prompt:
    given = [key for key in PROMPT_KEYS if record.get(key) is not None]
    if not given:
        raise RequestError(f"the line has no prompt; it must have one of {', '.join(PROMPT_KEYS)}")
    if len(given) > 1:
        raise RequestError(f"the line has {' and '.join(given)}; it must have one of them")
    key, value = given[0], record[given[0]]
    if key == "prompt" and not isinstance(value, str):
        raise RequestError(f"prompt is {_short(value)}; it must be a string")
    if key == "prompt_token_ids" and not (
        isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    ):
        raise RequestError(f"prompt_token_ids is {_short(value)}; it must be a list of integers")
    for_template = [name for name in CHAT_KEYS[1:] if record.get(name) is not None]
    if for_template and key != "messages":
        raise RequestError(f"{for_template[0]} goes with messages, and the line has {key}")
    if not value:
        raise RequestError(f"{key} is empty")
    if key == "messages":
        read_chat({name: record[name] for name in (key, *for_template)})
        return {name: record[name] for name in (key, *for_template)} if for_template else value
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
