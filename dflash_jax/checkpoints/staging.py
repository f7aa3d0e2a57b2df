"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_jax.errors import CheckpointError


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A scratch directory that takes the given name when the block ends well, and vanishes otherwise.

    Raises:
      CheckpointError: there is already something at the directory.
    """
    directory = Path(os.path.expanduser(directory)).absolute()
    _check_free(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        yield scratch
        _check_free(directory)
        _make_public(scratch)
        os.replace(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make_public(scratch: Path) -> None:
    """Gives the permissions of any new file: mkdtemp and safetensors make theirs private to the owner."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (scratch, *scratch.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _check_free(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} already exists and is not empty; a checkpoint is never overwritten, "
            "so give another directory or remove this one"
        )
