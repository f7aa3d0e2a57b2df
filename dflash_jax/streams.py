"""Files to read, wherever they come from: the disk, a pipe or the standard input."""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal

STDIN = "-"
"""The name of the standard input among paths."""

PIPE_SECONDS = 10.0
"""How long a named pipe is given until somebody opens it for writing."""

_PIECE = 1 << 16


def open_stream(path: str | Path, cancelled: Callable[[], bool] = lambda: False) -> BinaryIO:
    """Opens a file for reading, wherever it comes from; what can be read but once is copied to the disk first.

    Args:
      path: a file, a pipe, or "-" for the standard input.
      cancelled: whether to stop copying; what came so far is then all.

    Raises:
      OSError: it cannot be read; it is a directory, or a device, which might never end; or nobody writes to the pipe.
    """
    if str(path) == STDIN:
        if sys.stdin is None:
            raise OSError(errno.EBADF, "the standard input is closed", STDIN)
        file = os.dup(sys.stdin.fileno())
    else:
        # Opening a pipe that nobody writes to would wait for somebody.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        kind, empty = found.st_mode, found.st_rdev == os.stat(os.devnull).st_rdev
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if stat.S_ISBLK(kind) or (stat.S_ISCHR(kind) and not (empty or os.isatty(file))):
            raise OSError(errno.EINVAL, "it is a device, not a file or a pipe", str(path))
        if stat.S_ISREG(kind) or empty:
            return os.fdopen(file, "rb")
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - it is returned open
        try:
            _copy(file, copy, str(path), cancelled)
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return copy


def open_file(path: str | Path, mode: Literal["rb", "ab"] = "rb") -> BinaryIO:
    """Opens a file of the disk, which can be read more than once; a new one where the mode makes one.

    Args:
      path: the file.
      mode: "rb", or "ab" to write behind what it has.

    Raises:
      OSError: it cannot be opened, or is a directory, a device or a pipe, which might never end.
    """
    # Opening a pipe with nobody at its other end would wait for somebody.
    flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_APPEND | os.O_CREAT
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
        return os.fdopen(file, mode)
    except BaseException:
        os.close(file)
        raise


def _copy(file: int, sink: BinaryIO, name: str, cancelled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PIPE_SECONDS
    # A pipe that has no name was open for writing before.
    opened = name == STDIN or not stat.S_ISFIFO(os.stat(name, follow_symlinks=False).st_mode)
    while not cancelled():
        try:
            if not select.select([file], [], [], 0.2)[0] and opened:
                continue
            piece = os.read(file, _PIECE)
        except BlockingIOError:
            opened = True
            continue
        if piece:
            opened = True
            sink.write(piece)
        elif opened or _hung_up(file):
            return
        elif time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, f"it is a pipe that nobody wrote to for {PIPE_SECONDS:g} s", name)
        else:
            time.sleep(0.05)


def _hung_up(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
