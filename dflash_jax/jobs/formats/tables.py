"""Tables: Parquet and Arrow files, directories of them, and Hugging Face datasets as `save_to_disk` leaves them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dflash_jax.errors import ConfigError, RequestError, quote, reason
from dflash_jax.jobs.formats.base import Record
from dflash_jax.jobs.source import TABLES, Source
from dflash_jax.streams import open_stream

PARQUET, ARROW_FILE, ARROW_STREAM, OLD_FEATHER = TABLES
"""What the files begin with; Feather is Arrow's file format since its second version."""

_ENDINGS = (".parquet", ".arrow", ".feather")

PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids")

_BATCH_ROWS = 256
"""Rows of a Parquet file that are turned into Python's values at once."""

Open = Callable[[], BinaryIO]
"""Opens a file of a table, at its beginning."""


class Table:
    """A reader of a table, out of one file or several.

    Only the columns that make the prompts are read, and a batch of rows at a time.
    """

    row, adds_request = "row", False

    def __init__(
        self,
        files: Iterable[tuple[str, Open]],
        path: str,
        key: str,
        *,
        wanted: Collection[str],
        needed: Collection[str],
        source: Source | None = None,
    ):
        """Looks at the files' schemas.

        Args:
          files: names and how to open them.
          path: what the input is called in messages.
          key: the setting that names it.
          wanted: columns to read, if they are there.
          needed: those of them that must be.
          source: is closed with the table.

        Raises:
          ConfigError: a file cannot be read, lacks a column, or has none that can be a prompt.
        """
        self._source = source
        self._arrow = arrow(f"the input {quote(path)} ({key})")
        self._files = list(files)
        self._path, self._key = path, key
        self._columns: list[str] = []
        self._rows = 0
        for number, (name, open_) in enumerate(self._files):
            with self._reading(name), contextlib.closing(open_()) as file:
                names, rows = self._look(file)
            found = [column for column in names if column in wanted]
            missing = [column for column in needed if column not in found]
            if missing:
                raise ConfigError(
                    f"the table {quote(name)} ({key}) has no column {quote(missing[0])}; "
                    f"its columns are {_listed(names)}"
                )
            if not needed and not set(found) & set(PROMPT_COLUMNS):
                raise ConfigError(
                    f"the table {quote(name)} ({key}) has the columns {_listed(names)}, and none of "
                    f"{', '.join(PROMPT_COLUMNS)}; name one in input.columns, or give an input.template"
                )
            if number and set(found) != set(self._columns):
                raise ConfigError(
                    f"the table {quote(name)} ({key}) has the columns {_listed(found)}, and the first file "
                    f"{_listed(self._columns)}; the files of one table must have the same"
                )
            self._columns = found
            self._rows += rows

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._source is not None:
            self._source.close()

    def count(self) -> int:
        """How many rows there are."""
        return self._rows

    def rows(self) -> Iterator[tuple[int, Record]]:
        """Rows, each a mapping of the columns."""
        number = 0
        for name, open_ in self._files:
            with self._reading(name), contextlib.closing(open_()) as file:
                for batch in self._batches(file):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row

    def record(self, row: Record) -> Record:
        """The same mapping, with JSON's kinds of values alone."""
        return row

    def request(self, record: Record) -> Record:
        """The same mapping; a mapping may be given as JSON text."""
        found = dict(record)
        for name in ("messages", "tools", "chat_template_kwargs", "sampling"):
            if isinstance(found.get(name), str):
                try:
                    found[name] = json.loads(found[name])
                except ValueError:
                    raise RequestError(f"{name} is {quote(found[name])}, which is not JSON") from None
        return found

    def _look(self, file: BinaryIO) -> tuple[list[str], int]:
        """A file's columns, and how many rows it has."""
        magic = _magic(file)
        if magic == PARQUET:
            parquet = self._arrow.parquet.ParquetFile(file)
            return parquet.schema_arrow.names, parquet.metadata.num_rows
        if magic == ARROW_FILE:
            opened = self._arrow.ipc.open_file(file)
            batches: Iterable[Any] = map(opened.get_batch, range(opened.num_record_batches))
        else:
            batches = opened = self._arrow.ipc.open_stream(file)
        return opened.schema.names, sum(batch.num_rows for batch in batches)

    def _batches(self, file: BinaryIO) -> Iterator[Any]:
        magic = _magic(file)
        if magic == PARQUET:
            yield from self._arrow.parquet.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=self._columns)
            return
        if magic == ARROW_FILE:
            opened = self._arrow.ipc.open_file(file)
            batches: Iterable[Any] = map(opened.get_batch, range(opened.num_record_batches))
        else:
            batches = self._arrow.ipc.open_stream(file)
        for batch in batches:
            chosen = batch.select(self._columns)
            for start in range(0, chosen.num_rows, _BATCH_ROWS):
                yield chosen.slice(start, _BATCH_ROWS)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, self._arrow.ArrowException) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the table {quote(name)} ({self._key}) cannot be read ({reason(error)})") from None


def arrow(what: str) -> Any:
    """PyArrow, with its parts that read and write files.

    Args:
      what: needs it, for the error.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        for part in ("ipc", "parquet"):
            importlib.import_module(f"pyarrow.{part}")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ConfigError(f"{what} needs pyarrow; install it with `pip install 'dflash_jax[parquet]'`") from None


def directory_files(path: str, key: str, split: str | None) -> list[tuple[str, Open]]:
    """The files of a table in a directory, in their order.

    Args:
      path: a dataset as `save_to_disk` leaves it, with or without splits, or a directory of Parquet or Arrow files.
      key: the setting that names it.
      split: which of the splits.

    Raises:
      ConfigError: it has no table, or several and none is chosen.
    """
    directory = Path(path)
    splits = _names(directory / "dataset_dict.json", "splits")
    if splits is not None:
        if split not in splits:
            wanted = "input.split must name one of them" if split is None else f"input.split is {quote(split)}"
            raise ConfigError(f"the dataset {quote(path)} ({key}) has the splits {_listed(splits)}; {wanted}")
        return directory_files(str(directory / split), key, None)
    if split is not None:
        raise ConfigError(f"input.split is {quote(split)}, and {quote(path)} ({key}) is not a dataset with splits")
    names = _names(directory / "state.json", "_data_files")
    if names is None:
        names = sorted(
            name for name in os.listdir(directory) if name.endswith(_ENDINGS) and not name.startswith(("_", "."))
        )
    if not names:
        raise ConfigError(
            f"the directory {quote(path)} ({key}) has no {', '.join(_ENDINGS)} files, and is no dataset that "
            "save_to_disk wrote"
        )
    return [(str(directory / name), _opener(str(directory / name))) for name in names]


def _opener(path: str) -> Open:
    return lambda: open_stream(path)


def _names(path: Path, key: str) -> list[str] | None:
    """The names that a dataset's own JSON file lists; None if there is no such file.

    A file is named by a mapping, a split by its name; neither may lead out of the directory.
    """
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in listed]
        if not all(isinstance(name, str) and name == os.path.basename(name) != ".." for name in names):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} does not list {key} as Hugging Face datasets do; save the dataset again") from None
    return names


def _magic(file: BinaryIO) -> bytes:
    file.seek(0)
    first = file.read(6)
    file.seek(0)
    if first.startswith(OLD_FEATHER):
        raise ValueError("it is of Feather's first version; write it again with version 2")
    for magic in TABLES:
        if first.startswith(magic):
            return magic
    raise ValueError("it is neither Parquet nor Arrow")


def _listed(names: Collection[str], limit: int = 20) -> str:
    shown = ", ".join(list(names)[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
