"""A run's directory: what it was started with, its checkpoints, and the draft it exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Float

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.training.claims import difference, flatten, write_claim
from dflash_jax.training.config import CheckpointSection, TrainConfig
from dflash_jax.training.state import TrainState

# What may differ between a run and its resumption, because no weight depends on it: what the target and the
# sequences were made from is in their fingerprints.
_FREE = ("output", "log_every", "checkpoint", "evaluation", "pretrain")
_FREE_DATA = ("data.path", "data.rule", "data.features")


class RunStore:
    """The files of one run.

    Args:
      directory: `output` of its config.
      section: how often and how many checkpoints.
    """

    def __init__(self, directory: Path, section: CheckpointSection):
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=section.keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory / "checkpoints", options=options)

    @property
    def metrics(self) -> Path:
        """The run's metrics, a JSON object per line."""
        return self.directory / "metrics.jsonl"

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def claim(self, config: TrainConfig, facts: dict[str, str]) -> None:
        """Records what the run is, or checks that it is what was recorded.

        Args:
          config: the run's config.
          facts: fingerprints of what the config names.

        Raises:
          ConfigError: the directory holds another run's checkpoints.
        """
        described = {**run_settings(config), **facts}
        file = self.directory / "run.json"
        if file.exists() and self.latest_step() is not None and (changed := difference(file, described)):
            raise ConfigError(
                f"{self.directory} holds a run that was started with another config ({changed}); "
                "resume it with the same one, or give another output"
            )
        write_claim(file, described)

    def save_scale(self, scale: Float[np.ndarray, " features"]) -> None:
        """Keeps what the run divides features by."""
        np.save(self.directory / "feature_scale.npy", scale)

    def load_scale(self) -> Float[np.ndarray, " features"]:
        """What the run divides features by."""
        return np.load(self.directory / "feature_scale.npy")

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint, if this step has none yet."""
        step = int(state.step)
        if step != self._manager.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, bit for bit.

        Args:
          like: a state of the same structure and shapes.

        Raises:
          CheckpointError: it cannot be read.
        """
        step = self._manager.latest_step()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:  # Orbax raises many classes, none of its own
            raise CheckpointError(f"checkpoint {step} of {self.directory} cannot be restored ({error})") from error

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()


def run_settings(config: TrainConfig) -> dict[str, Any]:
    """What a run and its resumption must have in common, under dotted names."""
    flat = flatten(config.model_dump(mode="json", exclude=set(_FREE)))
    return {name: value for name, value in flat.items() if not name.startswith(_FREE_DATA)}
