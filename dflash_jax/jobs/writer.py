"""The job's output: results, appended durably."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from dflash_jax.errors import ConfigError, quote
from dflash_jax.jobs.ledger import Ledger, Result
from dflash_jax.writing import replacing

SYNC_SECONDS = 1.0
"""A machine that loses power loses at most this much; a process that dies loses nothing."""

MAX_RESULT = 1 << 28
"""Bytes of the longest line that is taken for a result."""


class ResultFile:
    """An output file of a result on each line, open for this job alone.

    Each result is handed to the system in one piece as it is written. Opening repairs a last line that an
    interrupted write left torn. Complete results of answers are never changed.
    """

    def __init__(
        self,
        path: str | Path,
        encode: Callable[[Result], Any] = lambda result: result,
        decode: Callable[[Any], Result | None] = lambda value: value,
    ):
        """Opens or creates the file, and its directory.

        Args:
          path: the file.
          encode: a result as the JSON value that is written of it.
          decode: the result that a JSON value was made of; None if it was made of none.

        Raises:
          ConfigError: another job has it, it is not an output file, or it cannot be written.
        """
        self.path = Path(path)
        self._encode, self._decode = encode, decode
        self._ledger = Ledger()
        self._synced = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(self.path)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"the output file {quote(str(self.path))} cannot be written ({reason})") from None
        try:
            self._load()
        except BaseException:
            os.close(self._file)
            raise

    def has(self, item_id: str | int) -> bool:
        """Whether the answer to an input line is there."""
        return str(item_id) in self._ledger.answered

    @property
    def answers(self) -> int:
        """How many answers are there."""
        return len(self._ledger.answered)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file).st_size

    def write(self, result: Result) -> None:
        """Appends a result; a refusal that is already there is not repeated.

        Raises:
          ConfigError: the disk is full or fails; the file is left as it was, or with a torn last line.
        """
        if not self._ledger.add(result):
            return
        try:
            _write_all(self._file, encode_line(self._encode(result)))
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            raise ConfigError(f"the output file {self.path} cannot be written ({error.strerror})") from None

    def clear(self) -> None:
        """Forgets all results."""
        os.ftruncate(self._file, 0)
        self._ledger.clear()

    def keep_refusals(self, ids: Collection[str]) -> None:
        """Removes refusals of lines that are no longer refused: they were mended, or are gone.

        Args:
          ids: of the refusals that hold.
        """
        if all(self._ledger.holds(result, ids) for result in self.results()):
            return
        # A new file takes the old one's place at once, so that a crash in between loses nothing.
        with replacing(self.path) as scratch:
            fresh = os.open(scratch, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                fcntl.flock(fresh, fcntl.LOCK_EX)
                for result in self.results():
                    if self._ledger.holds(result, ids):
                        _write_all(fresh, encode_line(self._encode(result)))
            except BaseException:
                os.close(fresh)
                raise
        os.close(self._file)
        self._file = fresh
        self._ledger.forget_refusals(ids)

    def results(self) -> Iterator[Result]:
        """All results in the file."""
        yield from read_results(self.path, self._decode)

    def close(self) -> None:
        """Makes sure of what was written, and lets go of the file."""
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(self) -> None:
        end, whole = 0, True
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_RESULT), b""), start=1):
                result = _decode(line, self._decode)
                if result is None and not line.endswith(b"\n") and _looks_torn(line):
                    os.ftruncate(self._file, end)
                    return
                if result is None:
                    raise ConfigError(
                        f"{self.path} line {number} is not a result that a job wrote; "
                        "mend or move the file, or give another output.path"
                    )
                end, whole = end + len(line), line.endswith(b"\n")
                self._ledger.add(result)
        if not whole:
            _write_all(self._file, b"\n")


def read_results(path: Path, decode: Callable[[Any], Result | None] = lambda value: value) -> Iterator[Result]:
    """The results in a file that a job wrote, whole ones; none if there is no such file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(MAX_RESULT), b""):
            result = _decode(line, decode)
            if result is not None:
                yield result


def encode_line(value: Any) -> bytes:
    """A JSON value as a line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # JSON need not escape these, but some readers take them for ends of lines.
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode() + b"\n"


def _decode(line: bytes, decode: Callable[[Any], Result | None]) -> Result | None:
    try:
        result = decode(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return result if _is_result(result) else None


def _is_result(value: Any) -> bool:
    """Whether it has what a job looks at in the results of earlier runs; older ones may lack some of it."""
    if not (isinstance(value, dict) and isinstance(value.get("id"), str | int)):
        return False
    metrics, reason = value.get("metrics", {}), value.get("finish_reason")
    return (
        isinstance(reason, str)
        and isinstance(metrics, dict)
        and all(each is None or isinstance(each, int | float) for each in metrics.values())
        and isinstance(value.get("token_ids", []), list)
        and isinstance(value.get("prompt_tokens", 0), int)
    )


def _looks_torn(line: bytes) -> bool:
    """Whether it may be the beginning of a result, or the zeros that some file systems leave after a crash."""
    return line.startswith(b"{") or not line.strip(b"\0")


def _open_locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ConfigError(
                    f"the output {quote(str(path))} is no file but a device or a pipe; give it a file, which the "
                    "job reads when it is run again"
                )
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another job may have put a new file in this one's place before the lock was ours.
            if os.fstat(file).st_ino == os.stat(path).st_ino:
                return file
        except BlockingIOError:
            os.close(file)
            raise ConfigError(f"another job is writing {path}; wait for it, or give another output.path") from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
