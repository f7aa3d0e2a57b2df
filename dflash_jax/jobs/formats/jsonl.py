"""This package's own JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dflash_jax.errors import RequestError, quote
from dflash_jax.jobs.formats.base import Record
from dflash_jax.jobs.source import MAX_LINE, Source


class JsonLines:
    """A reader of JSON lines: each an input line as `docs/job.md` has it."""

    row, adds_request = "line", False

    def __init__(self, source: Source):
        """Reads nothing yet.

        Args:
          source: is closed with the reader.
        """
        self._source = source

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self._source.__exit__(*exception)

    def count(self) -> int:
        """How many lines there are that are not blank."""
        return sum(1 for _ in self._source.lines())

    def rows(self) -> Iterator[tuple[int, bytes | None]]:
        """Those lines; None in place of one that is too long."""
        return self._source.lines()

    def record(self, row: bytes | None) -> Record:
        """The object on a line."""
        return parse_line(row)

    def request(self, record: Record) -> Record:
        """The same object."""
        return record


def parse_line(raw: bytes | None) -> Record:
    """The JSON object on a line.

    Raises:
      RequestError: there is none.
    """
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
        raise RequestError(f"the line is {quote(record, 60)}; it must be an object with a prompt")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the line has half of a surrogate pair in a string, which is no character") from None
    return record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")
