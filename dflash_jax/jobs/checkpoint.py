"""A job's snapshot: its engine in the middle of its requests, beside the output.

`out.jsonl.snapshot/` holds `job.json`, the settings that the answers depend on, and `engine/`, the
engine's own snapshot, which knows the requests in flight. It does not hold results: requests whose
results were written to the output after the snapshot was taken are dropped when the job continues.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.engine import Engine
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.writing import replace_file

_JOB, _ENGINE = "job.json", "engine"


def snapshot_path(output: str | Path) -> Path:
    """Where the snapshot of a job is: `out.jsonl` -> `out.jsonl.snapshot`."""
    output = Path(output)
    return output.with_name(output.name + ".snapshot")


class JobSnapshot:
    """The snapshot of the job that writes an output file."""

    def __init__(self, output: str | Path, settings: Mapping[str, Any], every: float | None):
        """Makes no files.

        Args:
          output: the job's output file.
          settings: those the answers depend on, see `JobConfig.identity`; a snapshot made under others is not used.
          every: seconds from one snapshot to the next; None takes none.
        """
        self.directory = snapshot_path(output)
        self._settings, self._every = dict(settings), every
        self._taken = time.monotonic()

    def begin(self) -> None:
        """Counts the seconds to the next snapshot from now on."""
        self._taken = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for one."""
        return self._every is not None and time.monotonic() - self._taken >= self._every

    def take(self, engine: Engine) -> None:
        """Saves the engine, replacing what was saved before, unless the job takes no snapshots.

        Raises:
          ConfigError: it cannot be written.
        """
        if self._every is None:
            return
        try:
            if self._recorded() != self._settings:
                self.remove()
                self.directory.mkdir(parents=True, exist_ok=True)
                replace_file(self.directory / _JOB, json.dumps(self._settings))
            engine.snapshot(self.directory / _ENGINE)
        except OSError as error:
            raise ConfigError(f"the snapshot {self.directory} cannot be written ({error.strerror or error})") from None
        # Counted from the end, so that a slow disk does not leave time for nothing else.
        self.begin()

    def restore(self, engine: Engine) -> str | None:
        """Takes an idle engine to where the snapshot was taken, if there is one.

        Returns:
          Why a snapshot that is there cannot be used, if so; the engine is then as it was.
        """
        recorded = self._recorded()
        if recorded is None:
            return None
        if recorded != self._settings:
            return "it was made under other settings"
        try:
            Engine.restore(self.directory / _ENGINE, engine)
        except CheckpointError as error:
            return str(error)
        return None

    def remove(self) -> None:
        """Removes the snapshot, if there is one."""
        # Without its settings it is no snapshot, however little of the rest is removed before a crash.
        (self.directory / _JOB).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _recorded(self) -> Any:
        try:
            return json.loads((self.directory / _JOB).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
