"""A run's metrics as event files for TensorBoard."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_jax.errors import ConfigError
from dflash_jax.training.run.callbacks import Callback

if TYPE_CHECKING:
    from dflash_jax.training.config import TrainConfig
    from dflash_jax.training.run.loop import Trained

FOLDER = "tensorboard"


class TensorBoard(Callback):
    """Writes `tensorboard/` in a run's output: a scalar for each figure, `kind/name`, and `kind/name/position`.

    Events after the step that a run goes on from are marked as void, as TensorBoard understands it.
    """

    def __init__(self) -> None:
        """Finds the package that writes the files.

        Raises:
          ConfigError: it is not installed.
        """
        try:
            self._package: Any = importlib.import_module("tensorboardX")
        except ImportError:
            raise ConfigError(
                "tensorboard: true needs tensorboardX; install it with `pip install 'dflash_jax[tensorboard]'`"
            ) from None
        self._writer: Any = None

    def begin(self, config: TrainConfig, directory: Path, step: int) -> None:
        """Opens a new event file."""
        purge = step + 1 if step else None
        self._writer = self._package.SummaryWriter(str(directory / FOLDER), purge_step=purge)

    def metrics(self, step: int, kind: str, figures: Mapping[str, Any]) -> None:
        """Writes a line's figures."""
        time = figures.get("unix_time")
        for name, value in _scalars(figures):
            self._writer.add_scalar(f"{kind}/{name}", value, step, walltime=time)
        # As the metrics' own file: a run that is killed has them.
        self._writer.flush()

    def end(self, trained: Trained | None) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


def _scalars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, list | tuple):
            yield from ((f"{name}/{place}", float(each)) for place, each in enumerate(value, start=1))
        elif isinstance(value, int | float) and name != "unix_time":
            yield name, float(value)
