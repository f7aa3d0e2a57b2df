"""What wants to hear of a training run while it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_jax.training.config import TrainConfig
    from dflash_jax.training.run.loop import Trained
    from dflash_jax.training.run.state import TrainState


class Callback:
    """Hears of a run. Each method does nothing until a subclass says otherwise."""

    def begin(self, config: TrainConfig, directory: Path, step: int) -> None:
        """The run begins, or goes on.

        Args:
          config: the run's.
          directory: its output.
          step: how many steps are taken already.
        """

    def metrics(self, step: int, kind: str, figures: Mapping[str, Any]) -> bool | None:
        """A line was written to the run's metrics.

        Args:
          step: steps taken.
          kind: "train", "held_out" or "engine".
          figures: numbers, and lists of numbers with an entry for each position of a block.

        Returns:
          True to end the run after this step, with a checkpoint.
        """

    def saved(self, step: int, state: TrainState) -> None:
        """A checkpoint was written.

        Args:
          step: steps taken.
          state: what is in it; its arrays live on the device.
        """

    def end(self, trained: Trained | None) -> None:
        """The run is over.

        Args:
          trained: its result; None if it failed.
        """


class Callbacks(Callback):
    """Several of them, in their order."""

    def __init__(self, each: Sequence[Callback]):
        self._each = tuple(each)

    def begin(self, config: TrainConfig, directory: Path, step: int) -> None:
        """Tells all of them."""
        for one in self._each:
            one.begin(config, directory, step)

    def metrics(self, step: int, kind: str, figures: Mapping[str, Any]) -> bool | None:
        """Tells all of them, and returns whether one wants to end the run."""
        # Not a generator: the others are told, too.
        return any([one.metrics(step, kind, figures) for one in self._each])

    def saved(self, step: int, state: TrainState) -> None:
        """Tells all of them."""
        for one in self._each:
            one.saved(step, state)

    def end(self, trained: Trained | None) -> None:
        """Tells all of them."""
        for one in self._each:
            one.end(trained)
