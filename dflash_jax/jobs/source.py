"""Where a job's input lines come from: a file, packed or not, or a pipe."""

from __future__ import annotations

import gzip
import importlib
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dflash_jax.errors import ConfigError, quote
from dflash_jax.streams import STDIN, open_stream

MAX_LINE = 1 << 24
"""Bytes of the longest line that is read."""

MAX_SKIPPED = 1 << 30
"""Bytes after which a line that is too long to be read, or blank ones on end, are taken to have no end."""

_BLANK_LINE = 1 << 10
"""Bytes that a blank line counts as at least: packed files unfold to a billion of them."""

_SPACE = b" \t\r\n\x0b\x0c"
_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff", b"FEA1")
"""What tables begin with: Parquet, Arrow's files and streams, and Feather before it was Arrow's file format."""


class Source:
    """An open input, whose lines can be read any number of times; a pipe is read once and kept.

    What is packed by gzip or Zstandard is known by its first bytes, whatever the name.
    """

    def __init__(self, path: str | Path, key: str = "input.path", cancelled: Callable[[], bool] = lambda: False):
        """Opens an input.

        Args:
          path: a file or a pipe; "-" and "/dev/stdin" are the standard input.
          key: the setting that names it.
          cancelled: whether to stop reading a pipe; what came so far is then all.

        Raises:
          ConfigError: it cannot be read.
        """
        self._path, self._key = str(path), key
        try:
            self._file: BinaryIO = open_stream(STDIN if self._path == "/dev/stdin" else self._path, cancelled)
        except FileNotFoundError:
            raise ConfigError(f"there is no input file {quote(self._path)} ({key})") from None
        except (OSError, ValueError) as error:
            raise self._unreadable(getattr(error, "strerror", None) or str(error)) from None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the input."""
        self._file.close()

    def begins_as_table(self) -> bool:
        """Whether it is a table rather than lines.

        Raises:
          ConfigError: it cannot be read.
        """
        try:
            self._file.seek(0)
            return self._file.read(6).startswith(TABLES)
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from None

    def duplicate(self) -> BinaryIO:
        """The input as a file of its own, as it is stored; both have one position."""
        return os.fdopen(os.dup(self._file.fileno()), "rb")

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Numbered lines that are not blank, from the first one on; None in place of one that is too long.

        Raises:
          ConfigError: it cannot be read to its end.
        """
        number = blank = 0
        try:
            file = self._unpacked()
            while piece := file.readline(MAX_LINE):
                number += 1
                if piece.endswith(b"\n") or len(piece) < MAX_LINE:
                    if number == 1:
                        piece = piece.removeprefix(_BOM)
                    if text := piece.strip(_SPACE):
                        blank = 0
                        yield number, text
                        continue
                    blank += max(len(piece), _BLANK_LINE)
                    if blank > MAX_SKIPPED:
                        raise self._unreadable(f"up to line {number} there is nothing but blank lines, without end")
                    continue
                self._skip(file, number)
                yield number, None
        except Exception as error:
            if not isinstance(error, OSError | EOFError | zlib.error) and type(error).__name__ != "ZstdError":
                raise
            where = f"after line {number}" if number else "from its first line on"
            raise self._unreadable(f"{where}: {getattr(error, 'strerror', None) or error}") from None

    def _unpacked(self) -> Any:
        self._file.seek(0)
        first = self._file.read(4)
        self._file.seek(0)
        if first.startswith(_GZIP):
            return gzip.open(self._file)
        if first == _ZSTANDARD:
            return _zstandard().open(self._file)
        return self._file

    def _skip(self, file: Any, number: int) -> None:
        skipped = 0
        while (piece := file.readline(MAX_LINE)) and not piece.endswith(b"\n"):
            skipped += len(piece)
            if skipped > MAX_SKIPPED:
                raise self._unreadable(f"line {number} has no end within {MAX_SKIPPED >> 30} GiB")

    def _unreadable(self, reason: str) -> ConfigError:
        return ConfigError(f"the input file {quote(self._path)} ({self._key}) cannot be read ({reason})")


def _zstandard() -> Any:
    """Python's own module, or the same one for Pythons before it; imported where it is needed."""
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
