"""Where caches are, and directories and files that nobody but this user may change."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def cache_directory() -> Path:
    """The directory of caches: `$DFLASH_JAX_CACHE`, or `~/.cache/dflash_jax`.

    Raises:
      OSError: neither is there.
    """
    if given := os.environ.get("DFLASH_JAX_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "dflash_jax"
    except RuntimeError:
        raise FileNotFoundError(
            errno.ENOENT, "this user has no home directory; $DFLASH_JAX_CACHE must name a directory"
        ) from None


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
