"""Atomic file writes, directories that one process writes at a time, pipes, and where caches are."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import select
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dflash_jax.errors import ConfigError

STDIN = "-"
"""The name of the standard input among paths."""

PIPE_SECONDS = 10.0
"""How long a named pipe is given until somebody opens it for writing."""

_PIECE = 1 << 16


def cache_directory() -> Path:
    """The directory of caches: `$DFLASH_JAX_CACHE`, or `~/.cache/dflash_jax`."""
    return Path(os.environ.get("DFLASH_JAX_CACHE") or Path.home() / ".cache" / "dflash_jax")


def exposure(path: Path) -> str | None:
    """Who, other than this user and root, may change what is at a path, as a clause; None if nobody may.

    Args:
      path: resolved, so that no link on the way leads elsewhere the next time.
    """
    for place in (path, *path.parents):
        found = place.lstat()
        if found.st_uid != os.getuid() and (place == path or found.st_uid != 0):
            return f"{place} belongs to another user (uid {found.st_uid})"
        # In a sticky directory, as /tmp is, nobody can exchange what belongs to somebody else.
        if found.st_mode & 0o022 and (place == path or not found.st_mode & stat.S_ISVTX):
            return f"others may write to {place} (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def private_directory(directory: Path) -> Path:
    """A directory for what this user will run, made if it is not there.

    Returns:
      Its resolved path.

    Raises:
      PermissionError: somebody else may change what is in it; the message says who and where.
      OSError: it cannot be made.
    """
    directory = directory.absolute()
    for level in (*reversed(directory.parents), directory):
        with contextlib.suppress(FileExistsError):
            level.mkdir(mode=0o700)
    directory = directory.resolve(strict=True)
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    if reason := exposure(directory):
        raise PermissionError(reason)
    return directory


def read_private(path: Path) -> bytes:
    """The content of a file in a private directory.

    Raises:
      PermissionError: it is not a plain file of this user that nobody else may write.
      OSError: it cannot be read.
    """
    # Of a link this fails, and of a pipe it does not wait.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} is not a file that only this user may write")
        return file.read()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file beside `path` that takes its place, on disk, when the block ends well, and vanishes otherwise.

    A process that dies on the way leaves the old file as it was.

    Raises:
      OSError: it cannot be written; the old file stays.
    """
    # Processes on other machines, or in other containers, may have the same number. A name may be as long
    # as the file system takes, so only its beginning is used.
    scratch = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield scratch
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Gives a file new content; a process that dies on the way leaves the old one.

    Args:
      path: the file.
      content: all of it.
      mode: its permissions; what the process gives new files by default.

    Raises:
      OSError: it cannot be written; the old content stays.
    """
    with replacing(path) as scratch, scratch.open("wb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(content.encode() if isinstance(content, str) else content)


def replace_array(path: Path, array: np.ndarray) -> None:
    """The same for an array, as `np.save` writes it."""
    content = io.BytesIO()
    np.save(content, array)
    replace_file(path, content.getvalue())


@contextmanager
def sole_writer(lock: Path, what: str) -> Iterator[None]:
    """Holds a lock file while the block runs; a process that ends, however, lets go of it.

    Args:
      lock: the file; made if it is not there, and left there.
      what: what it guards, as the error shall call it.

    Raises:
      ConfigError: another process holds it.
      OSError: it cannot be made.
    """
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing {what}; wait until it has ended, or give another output"
            ) from None
        yield


def open_stream(path: str | Path, cancelled: Callable[[], bool] = lambda: False) -> BinaryIO:
    """Opens a file for reading, wherever it comes from; what can be read but once is copied to the disk first.

    Args:
      path: a file, a pipe, or "-" for the standard input.
      cancelled: whether to stop copying; what came so far is then all.

    Raises:
      OSError: it cannot be read; it is a directory, or a device, which might never end; or nobody writes to the pipe.
    """
    if str(path) == STDIN:
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
