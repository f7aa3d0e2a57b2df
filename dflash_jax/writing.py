"""Files that are written whole or not at all, and what one process writes at a time."""

from __future__ import annotations

import fcntl
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dflash_jax.errors import ConfigError


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
