"""What a format is: a reader of rows, or a store of results. A new one is a file with one, and a line in `formats`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any, Protocol

from dflash_jax.jobs.ledger import Result

Record = dict[str, Any]
"""A row of the input as a mapping: of column names, or of the keys of a JSON object."""


class Reader(Protocol):
    """An open input, whose rows can be gone through any number of times.

    Attributes:
      row: what a row is called in messages: "line" or "row".
      adds_request: whether `request` adds "request", which is handed on to the result; else that key is the user's.
    """

    row: str
    adds_request: bool

    def __enter__(self) -> Reader: ...

    def __exit__(self, *exception: object) -> None: ...

    def count(self) -> int:
        """How many rows `rows` yields."""
        ...

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Rows as they are stored, with their numbers, from 1.

        Raises:
          ConfigError: the input cannot be read to its end.
        """
        ...

    def record(self, row: Any) -> Record:
        """A row as a mapping. What it has under "id" is the id of its answer.

        Raises:
          RequestError: it is none.
        """
        ...

    def request(self, record: Record) -> Record:
        """A record in the keys of this package's own JSON lines, see `docs/job.md`.

        Raises:
          RequestError: it asks for something that cannot be done.
        """
        ...


class Results(Protocol):
    """An open output. What was written stays when the process is killed, and is known when it is opened again."""

    def __enter__(self) -> Results: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def has(self, item_id: str | int) -> bool:
        """Whether the answer to an input line is there."""
        ...

    @property
    def answers(self) -> int:
        """How many answers are there."""
        ...

    def write(self, result: Result) -> None:
        """Adds a result; a refusal that is already there is not repeated.

        Raises:
          ConfigError: the disk is full or fails.
        """
        ...

    def clear(self) -> None:
        """Forgets all results."""
        ...

    def keep_refusals(self, ids: Collection[str]) -> None:
        """Removes refusals of lines that are no longer refused: they were mended, or are gone.

        Args:
          ids: of the refusals that hold.
        """
        ...

    def results(self) -> Iterator[Result]:
        """All results, as they were written."""
        ...
