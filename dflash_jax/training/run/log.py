"""A run's metrics, as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_jax.errors import TrainingError
from dflash_jax.training.run.callbacks import Callback
from dflash_jax.writing import replace_file


class MetricsLog:
    """A file of JSON objects, each with `step` and `kind`.

    Lines after the step that a run resumes from belong to steps it will take again, and are dropped.

    Args:
      file: where to; appended to.
      step: where the run is.
      callbacks: are told of each line.

    Attributes:
      over: whether one of them wants the run to end.
    """

    def __init__(self, file: Path, step: int, callbacks: Callback | None = None):
        kept = [line for line in read_metrics(file) if line["step"] <= step] if file.exists() else []
        content = "".join(json.dumps(line) + "\n" for line in kept)
        if not file.exists() or file.read_bytes() != content.encode():
            replace_file(file, content)
        # Not buffered: what a full disk does not take would be tried again as Python ends.
        self._file, self._stream = file, file.open("ab", buffering=0)
        self._callbacks, self.over = callbacks or Callback(), False

    def write(self, step: int, kind: str, figures: dict[str, Any]) -> None:
        """Adds a line.

        Raises:
          TrainingError: it cannot be written; a line that is cut off is left out when the file is read.
        """
        data = json.dumps({"step": step, "kind": kind, **figures}).encode() + b"\n"
        try:
            while data:
                data = data[self._stream.write(data) :]
        except OSError as error:
            raise TrainingError(
                f"the metrics {self._file} cannot be written ({error.strerror}); "
                "the same command continues from the newest checkpoint"
            ) from None
        self.over = bool(self._callbacks.metrics(step, kind, figures)) or self.over

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


def read_metrics(file: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a metrics file, of one kind if given. Lines that were cut off or are damaged are left out."""
    lines = []
    for line in file.read_bytes().splitlines():
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict) and isinstance(parsed.get("step"), int) and kind in (None, parsed.get("kind")):
            lines.append(parsed)
    return lines
