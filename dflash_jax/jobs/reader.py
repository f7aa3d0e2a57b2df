"""The job's input: its rows to prompts, or to what is wrong with them."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_jax.engine.prompts import Prompt
from dflash_jax.engine.request import SamplingParams, sample_id
from dflash_jax.errors import RequestError, cut, quote
from dflash_jax.jobs.config import InputFile
from dflash_jax.jobs.disk_map import DiskMap
from dflash_jax.jobs.formats import open_input
from dflash_jax.jobs.formats.base import Reader
from dflash_jax.jobs.formats.jsonl import JsonLines
from dflash_jax.jobs.shape import Shape
from dflash_jax.jobs.source import Source
from dflash_jax.text.chat import CHAT_KEYS, read_chat

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_KEYS = ("id", *PROMPT_KEYS, *CHAT_KEYS[1:], "sampling")
_SAMPLING_KEYS = tuple(field.name for field in dataclasses.fields(SamplingParams))

# Parameters that other engines take beside the prompt and this one does not have. To pass them over would be to
# answer something else than was asked.
_FOREIGN_KEYS = [
    "best_of",
    "top_logprobs",
    "max_completion_tokens",
    "max_new_tokens",
    "response_format",
    "guided_json",
    "guided_regex",
    "typical_p",
    "echo",
    "suffix",
    "stream",
    "use_beam_search",
    "beam_width",
    "do_sample",
    "num_beams",
]

MAX_ID = 1000
"""Characters of the longest id."""

_MAX_CHECKED = 100
"""Unknown keys of a line that are compared with the known ones, to find typing errors."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A prompt.

    Attributes:
      line: its line in the input, from 1.
      id: as the line gives it, a string or an integer; `line-N` if it gives none.
      prompt: text, token ids, messages, or a mapping of messages and the line's other `CHAT_KEYS`.
      sampling: the job's parameters with the line's own on top.
      request: what the input's format wants to find in the result.
      row: what a line of the input is called: "line", or "row" in a table.
    """

    line: int
    id: str | int
    prompt: Prompt
    sampling: SamplingParams
    request: Mapping[str, Any] | None = None
    row: str = "line"


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that cannot be run. Its id is its own if that could be read and no other line has it, else `line-N`."""

    line: int
    id: str | int
    error: str
    row: str = "line"


def read_items(
    source: Reader | Source | InputFile | str | Path,
    defaults: SamplingParams,
    key: str = "input.path",
    *,
    settings: InputFile | None = None,
) -> Iterator[Item | BadLine]:
    """Reads an input; blank lines are passed over. Ids are unique, 7 and "7" being the same.

    Args:
      source: the open input, lines of this package's own, or what to open: a path or an input's settings.
      defaults: of sampling.
      key: the setting that names the path.
      settings: of an input that is open: what its columns are called, and the template of its prompts.

    Raises:
      ConfigError: the input cannot be read.
    """
    if isinstance(source, str | Path):
        source = InputFile(path=str(source))
    if isinstance(source, InputFile):
        with open_input(source, key) as opened:
            yield from read_items(opened, defaults, settings=source)
        return
    reader: Reader = JsonLines(source) if isinstance(source, Source) else source
    shape = Shape(settings)
    seen = DiskMap()
    for number, row in reader.rows():
        made = f"{reader.row}-{number}"
        while made in seen:
            made += "'"
        item = _read(reader, shape, number, row, made, defaults)
        for name in _names(item):
            earlier = seen.get(name)
            if earlier is not None:
                which = quote(item.id) if name == str(item.id) else f"{quote(name)} of one of its samples"
                error = f"the id {which} is already that of {reader.row} {earlier}; ids must be unique"
                item = BadLine(number, made, error, reader.row)
                break
        for name in _names(item):
            seen[name] = number
        yield item


def _names(item: Item | BadLine) -> list[str]:
    """The ids that nobody else can have: a line's own, and those of its samples."""
    return [sample_id(str(item.id), index) for index in range(item.sampling.n if isinstance(item, Item) else 1)]


def _read(reader: Reader, shape: Shape, number: int, row: Any, made: str, defaults: SamplingParams) -> Item | BadLine:
    item_id: str | int = made
    try:
        record = shape.rename(reader.record(row))
        given = record.get("id")
        if given is not None:
            if not isinstance(given, str | int) or isinstance(given, bool) or given == "":
                raise RequestError(f"id is {_short(given)}; it must be a string or an integer")
            if len(str(given)) > MAX_ID:
                raise RequestError(f"id is {_short(given)}; it may have {MAX_ID:,} characters")
            item_id = given
        record = shape.fill(reader.request(record))
        _check_keys(record)
        prompt = _prompt(record)
        own = record.get("sampling")
        sampling = defaults if own is None else defaults.override(own)
    except RequestError as error:
        return BadLine(number, item_id, str(error), reader.row)
    except Exception as error:
        # Whatever a line makes this code raise, it must not keep the other lines from being answered.
        return BadLine(
            number, item_id, f"the {reader.row} cannot be read ({type(error).__name__}: {cut(str(error))})", reader.row
        )
    return Item(number, item_id, prompt, sampling, record.get("request") if reader.adds_request else None, reader.row)


def _check_keys(record: dict[str, Any]) -> None:
    """Refuses sampling parameters in the wrong place and misspelt keys; other keys are left to the user."""
    unknown = [key for key, value in record.items() if key not in _KEYS and value is not None]
    for key in unknown:
        if key in _SAMPLING_KEYS:
            value = _short(record[key])
            raise RequestError(f'{key} is beside the prompt; it belongs into "sampling": {{"{key}": {value}}}')
        if key in _FOREIGN_KEYS:
            known = ", ".join(_SAMPLING_KEYS)
            raise RequestError(f"{key} is no sampling parameter here; leave it out, the known ones are {known}")
    for key in unknown[:_MAX_CHECKED]:
        near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.85) if len(key) <= 64 else []
        if near:
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
    # Tables have values that JSON has not.
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
