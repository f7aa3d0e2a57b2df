"""The job's output: rows that stay written."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from dflash_jax.errors import ConfigError

SYNC_SECONDS = 1.0
"""A machine that loses power loses at most this much; a process that dies loses nothing."""

Row = dict[str, Any]


def is_refusal(row: Row) -> bool:
    """Whether a row says that an input line could not be run, rather than what came of running it."""
    return row.get("finish_reason") == "error" and "line" in row


class RowFile:
    """An output file, open for this job alone.

    Each row is handed to the system in one piece as it is written. Opening repairs a last line that an
    interrupted write left torn. Complete rows of answers are never changed.
    """

    def __init__(self, path: str | Path, *, on_row: Callable[[Row], None] = lambda row: None):
        """Opens or creates the file, and its directory.

        Args:
          path: the file.
          on_row: is shown every row that is already there.

        Raises:
          ConfigError: another job has it, it is not an output file, or it cannot be written.
        """
        self.path = Path(path)
        self.done: set[str] = set()
        self.refusals: dict[str, Row] = {}
        self._synced = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(self.path)
        except OSError as error:
            raise ConfigError(f"the output file {self.path} cannot be written ({error.strerror})") from None
        try:
            self._load(on_row)
        except BaseException:
            os.close(self._file)
            raise

    def has(self, item_id: str | int) -> bool:
        """Whether the answer to an input line is there."""
        return str(item_id) in self.done

    def write(self, row: Row) -> None:
        """Appends a row; a refusal that is already there is not repeated.

        Raises:
          ConfigError: the disk is full or fails; the file is left as it was, or with a torn last line.
        """
        if is_refusal(row):
            if self.refusals.get(str(row["id"])) == row:
                return
            self.refusals[str(row["id"])] = row
        else:
            self.done.add(str(row["id"]))
        try:
            _write_all(self._file, encode(row))
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            raise ConfigError(f"the output file {self.path} cannot be written ({error.strerror})") from None

    def clear(self) -> None:
        """Forgets all rows."""
        os.ftruncate(self._file, 0)
        self.done, self.refusals = set(), {}

    def keep_refusals(self, ids: Collection[str]) -> None:
        """Removes refusals of lines that are no longer refused: they were mended, or are gone.

        Args:
          ids: of the refusals that hold.
        """
        kept: dict[str, Row] = {key: row for key, row in self.refusals.items() if key in ids}

        def holds(row: Row) -> bool:
            return not is_refusal(row) or kept.get(str(row["id"])) == row

        if all(holds(row) for row in self.rows()):
            return
        # A new file takes the old one's place at once, so that a crash in between loses nothing.
        scratch = self.path.with_name(self.path.name + ".new")
        fresh = os.open(scratch, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        fcntl.flock(fresh, fcntl.LOCK_EX)
        for row in self.rows():
            if holds(row):
                _write_all(fresh, encode(row))
        os.fsync(fresh)
        os.replace(scratch, self.path)
        os.close(self._file)
        self._file, self.refusals = fresh, kept

    def rows(self) -> Iterator[Row]:
        """All rows in the file."""
        with self.path.open("rb") as file:
            for line in file:
                yield json.loads(line)

    def close(self) -> None:
        """Makes sure of what was written, and lets go of the file."""
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(self, on_row: Callable[[Row], None]) -> None:
        end, whole = 0, True
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = _decode(line)
                if row is None and not line.endswith(b"\n") and _looks_torn(line):
                    os.ftruncate(self._file, end)
                    return
                if row is None:
                    raise ConfigError(
                        f"{self.path} line {number} is not a row that a job wrote; "
                        "mend or move the file, or give another output.path"
                    )
                end, whole = end + len(line), line.endswith(b"\n")
                if is_refusal(row):
                    self.refusals[str(row["id"])] = row
                else:
                    self.done.add(str(row["id"]))
                on_row(row)
        if not whole:
            _write_all(self._file, b"\n")


def encode(row: Row) -> bytes:
    """A row as a line."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    # JSON need not escape these, but some readers take them for ends of lines.
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode() + b"\n"


def _decode(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "id" in row and "finish_reason" in row else None


def _looks_torn(line: bytes) -> bool:
    """Whether it may be the beginning of a row, or the zeros that some file systems leave after a crash."""
    return line.startswith(b"{") or not line.strip(b"\0")


def _open_locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another job may have put a new file in this one's place before the lock was ours.
            if os.fstat(file).st_ino == os.stat(path).st_ino:
                return file
        except BlockingIOError:
            os.close(file)
            raise ConfigError(f"another job is writing {path}; wait for it, or give another output.path") from None
        except FileNotFoundError:
            pass
        os.close(file)


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
