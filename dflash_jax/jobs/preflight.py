"""What can be wrong with a job's files, looked at before JAX is imported, which takes seconds."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.checkpoints.sources import is_fetched, resolve
from dflash_jax.jobs.config import JobConfig
from dflash_jax.jobs.formats import open_input
from dflash_jax.streams import STDIN

_STDIN = (STDIN, "/dev/stdin")


def check_files(job: JobConfig) -> None:
    """Looks for the input and the checkpoints; what comes out of a pipe or off a network is left for later.

    Raises:
      ConfigError: there is no such input, or it cannot be read as what it is.
      CheckpointError: there is no such checkpoint.
    """
    path = job.input.path
    # A pipe can be read but once.
    if path not in _STDIN and (os.path.isfile(path) or os.path.isdir(path) or not os.path.lexists(path)):
        with open_input(job.input):
            pass
    for source in (job.target, *([job.draft] if job.draft is not None else [])):
        if not is_fetched(source.path):
            _check_checkpoint(resolve(source.path, source.revision, source.file))


def _check_checkpoint(found: Path) -> None:
    if found.is_dir():
        read_object(found / "config.json")
