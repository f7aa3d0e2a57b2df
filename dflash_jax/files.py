"""Files that are whole or not there, directories that one process writes at a time, and where caches lie."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dflash_jax.errors import ConfigError


def cache_directory() -> Path:
    """Where what can be made again is kept: `$DFLASH_JAX_CACHE`, or `~/.cache/dflash_jax`."""
    return Path(os.environ.get("DFLASH_JAX_CACHE") or Path.home() / ".cache" / "dflash_jax")


def exposure(path: Path) -> str | None:
    """Who but this user and root may change what lies at a path, as a clause; None if nobody may.

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


def replace_file(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Gives a file new content; a process that dies on the way leaves the old one.

    Args:
      path: the file.
      content: all of it.
      mode: its permissions; what the process gives new files by default.

    Raises:
      OSError: it cannot be written; the old content stays.
    """
    data = content.encode() if isinstance(content, str) else content
    # Processes on other machines, or in other containers, may have the same number.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with scratch.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def replace_array(path: Path, array: np.ndarray) -> None:
    """The same for an array, as `np.save` writes it."""
    content = io.BytesIO()
    np.save(content, array)
    replace_file(path, content.getvalue())


@contextlib.contextmanager
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
