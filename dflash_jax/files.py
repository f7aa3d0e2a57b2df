"""Files that are whole or not there, directories that one process writes at a time, and where caches lie."""

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


def cache_directory() -> Path:
    """Where what can be made again is kept: `$DFLASH_JAX_CACHE`, or `~/.cache/dflash_jax`."""
    return Path(os.environ.get("DFLASH_JAX_CACHE") or Path.home() / ".cache" / "dflash_jax")


def replace_file(path: Path, content: str | bytes) -> None:
    """Gives a file new content; a process that dies on the way leaves the old one.

    Raises:
      OSError: it cannot be written; the old content stays.
    """
    data = content.encode() if isinstance(content, str) else content
    # Processes on other machines, or in other containers, may have the same number.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with scratch.open("wb") as file:
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
