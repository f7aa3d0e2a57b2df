"""Results as Parquet: a directory of files, each closed when its rows are enough for a row group.

A Parquet file cannot be read before its end is written. So rows are first appended to `_rows.jsonl` in the directory,
as durably as a job's JSON lines, and move into a file of their own when there are enough of them, and at the end.
Programs that read a directory of Parquet files as one table pass over names that begin with "_".
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, get_type_hints

from dflash_jax.engine.output import Metrics
from dflash_jax.errors import ConfigError, quote, reason
from dflash_jax.jobs.formats.tables import arrow
from dflash_jax.jobs.ledger import Ledger, Result, is_refusal
from dflash_jax.jobs.writer import ResultFile, read_results
from dflash_jax.writing import replacing

ROWS = "_rows.jsonl"

_MOST_BYTES = 1 << 25
"""Of rows that wait: answers may be long."""

_READ_ROWS = 256

_MORE = "more"
"""A column of JSON text: what a result has beside the columns."""


class ParquetResults:
    """An output directory, open for this job alone."""

    def __init__(self, path: str | Path, row_group: int):
        """Opens or creates the directory.

        Args:
          path: of it.
          row_group: rows of each file.

        Raises:
          ConfigError: another job has it, it is something else, or it cannot be written.
        """
        self.path = Path(path)
        self._arrow, self._row_group = arrow("Parquet output"), row_group
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                f"the output {quote(str(path))} is a file, and Parquet output is a directory of files; "
                "give another output.path"
            )
        self._ledger = Ledger()
        self._waiting = ResultFile(self.path / ROWS)
        try:
            for result in self._closed_results():
                self._ledger.add(result)
            self._drop_what_was_moved()
            self._count = 0
            for result in self._waiting.results():
                self._ledger.add(result)
                self._count += 1
        except BaseException:
            self._waiting.close()
            raise

    def __enter__(self) -> ParquetResults:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            # What ends the job is told; the rows stay where they are, and are known when it is run again.
            if error is None:
                self._close_group(last=True)
        finally:
            self._waiting.close()
        if error is None:
            (self.path / ROWS).unlink(missing_ok=True)

    def has(self, item_id: str | int) -> bool:
        """Whether the answer to an input row is there."""
        return str(item_id) in self._ledger.answered

    @property
    def answers(self) -> int:
        """How many answers are there."""
        return len(self._ledger.answered)

    def write(self, result: Result) -> None:
        """Adds a result; a refusal that is already there is not repeated.

        Raises:
          ConfigError: the disk is full or fails.
        """
        if not self._ledger.add(result):
            return
        self._waiting.write(result)
        self._count += 1
        if self._count >= self._row_group or self._waiting.size >= _MOST_BYTES:
            self._close_group()

    def clear(self) -> None:
        """Forgets all results."""
        for part in parts(self.path):
            part.unlink()
        self._waiting.clear()
        self._ledger.clear()
        self._count = 0

    def keep_refusals(self, ids: Collection[str]) -> None:
        """Removes refusals of rows that are no longer refused: they were mended, or are gone.

        Args:
          ids: of the refusals that hold.
        """
        if all(self._ledger.holds(result, ids) for result in self._refusals_written()):
            return
        self._close_group()
        for part in parts(self.path):
            found = list(read_part(self._arrow, part))
            kept = [result for result in found if self._ledger.holds(result, ids)]
            if not kept:
                part.unlink()
            elif len(kept) < len(found):
                self._write_part(part, kept)
        self._ledger.forget_refusals(ids)

    def results(self) -> Iterator[Result]:
        """All results."""
        yield from self._closed_results()
        yield from self._waiting.results()

    def _refusals_written(self) -> Iterator[Result]:
        return filter(is_refusal, self.results()) if self._ledger.refusals else iter(())

    def _closed_results(self) -> Iterator[Result]:
        for part in parts(self.path):
            yield from read_part(self._arrow, part)

    def _drop_what_was_moved(self) -> None:
        """Forgets waiting rows that a job moved into a file and was killed before it could forget them."""
        # All of them move at once, so either all are there or none is.
        if all(map(self._is_closed, self._waiting.results())):
            self._waiting.clear()

    def _is_closed(self, result: Result) -> bool:
        key = str(result["id"])
        return key in self._ledger.answered or self._ledger.refusals.get(key) == result

    def _close_group(self, last: bool = False) -> None:
        """Moves the rows that wait into a file.

        Args:
          last: write a file without rows if there is no other, so that the directory can be read.

        Raises:
          ConfigError: it cannot be written; the rows go on waiting.
        """
        rows, earlier = list(self._waiting.results()), parts(self.path)
        if not rows and (earlier or not last):
            return
        number = 1 + int(earlier[-1].stem.removeprefix(_PART)) if earlier else 0
        self._write_part(self.path / f"{_PART}{number:06d}.parquet", rows)
        self._waiting.clear()
        self._count = 0

    def _write_part(self, part: Path, results: list[Result]) -> None:
        try:
            table = self._arrow.Table.from_pylist([_to_row(r) for r in results], schema=schema(self._arrow))
            with replacing(part) as scratch:
                self._arrow.parquet.write_table(table, scratch, compression="zstd", row_group_size=max(1, len(results)))
        except (OSError, self._arrow.ArrowException) as error:
            why = getattr(error, "strerror", None) or reason(error)
            raise ConfigError(f"the output file {part} cannot be written ({why})") from None


_PART = "part-"


def parts(directory: Path) -> list[Path]:
    """The files of an output, in the order in which they were closed."""
    return sorted(path for path in directory.glob(f"{_PART}*.parquet") if path.stem.removeprefix(_PART).isdecimal())


def read_parquet_results(directory: Path) -> Iterator[Result]:
    """The results in a directory that a job wrote."""
    pyarrow = arrow("Parquet output")
    moved = Ledger()
    for part in parts(directory):
        for result in read_part(pyarrow, part):
            moved.add(result)
            yield result
    for result in read_results(directory / ROWS):
        if str(result["id"]) not in moved.answered and moved.add(result):
            yield result


def read_part(pyarrow: Any, part: Path) -> Iterator[Result]:
    """The results in one file.

    Raises:
      ConfigError: no job wrote it.
    """
    wanted = schema(pyarrow)
    try:
        with pyarrow.parquet.ParquetFile(part) as file:
            if not file.schema_arrow.equals(wanted):
                raise ConfigError(
                    f"{part} is not a file of results of this version; move it, or give another output.path"
                )
            for batch in file.iter_batches(_READ_ROWS):
                yield from map(_from_row, batch.to_pylist())
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{part} cannot be read ({reason(error)}); move it, and the answers in it are made again"
        ) from None


def schema(pyarrow: Any) -> Any:
    """The columns."""
    counts = pyarrow.list_(pyarrow.int64())
    return pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("text", pyarrow.string()),
            ("token_ids", pyarrow.list_(pyarrow.int32())),
            ("finish_reason", pyarrow.string()),
            ("prompt_tokens", pyarrow.int64()),
            ("metrics", pyarrow.struct([(name, pyarrow.type_for_alias(kind)) for name, kind in _numbers().items()])),
            ("fallback", pyarrow.string()),
            ("positions", pyarrow.struct([(name, counts) for name in ("reached", "kept")])),
            ("error", pyarrow.string()),
            ("line", pyarrow.int64()),
            (_MORE, pyarrow.string()),
        ]
    )


_OPTIONAL = ("positions", "error", "line")
_COLUMNS = ("id", "text", "token_ids", "finish_reason", "prompt_tokens", "metrics", "fallback", *_OPTIONAL)


def _numbers() -> dict[str, str]:
    """The metrics that are single numbers, with Arrow's names of their types."""
    hints = get_type_hints(Metrics)
    kinds = {int: "int64", float: "float64", int | None: "int64", float | None: "float64"}
    return {field.name: kinds[hints[field.name]] for field in dataclasses.fields(Metrics) if hints[field.name] in kinds}


def _to_row(result: Result) -> dict[str, Any]:
    """A result as a row; what has no column of its own is text."""
    more = {key: value for key, value in result.items() if key not in _COLUMNS}
    numbers = _numbers()
    if metrics := {name: value for name, value in (result.get("metrics") or {}).items() if name not in numbers}:
        more["metrics"] = metrics
    row = {name: result.get(name) for name in _COLUMNS}
    row["id"] = str(result["id"])
    return {**row, _MORE: json.dumps(more, ensure_ascii=False) if more else None}


def _from_row(row: dict[str, Any]) -> Result:
    """The result that a row was made of."""
    result = {name: row[name] for name in _COLUMNS if name not in _OPTIONAL or row[name] is not None}
    more = json.loads(row[_MORE] or "{}")
    if metrics := more.pop("metrics", None):
        result["metrics"] = {**result["metrics"], **metrics}
    return {**result, **more}


def holds_results(path: str | Path) -> bool:
    """Whether a directory is such an output."""
    return os.path.isdir(path) and (bool(parts(Path(path))) or (Path(path) / ROWS).exists())
