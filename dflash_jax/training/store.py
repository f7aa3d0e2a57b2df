"""A run's directory: what it was started with, its checkpoints, and the draft it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Float

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.training.config import CheckpointSection, TrainConfig
from dflash_jax.training.state import TrainState

# What may differ between a run and its resumption, because no weight depends on it.
_FREE = ("output", "log_every", "checkpoint", "evaluation")
_FREE_DATA = ("path", "features", "features_gb")


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
        described = {**_described(config), **facts}
        file = self.directory / "run.json"
        if file.exists() and self.latest_step() is not None:
            recorded = json.loads(file.read_text())
            changed = sorted(name for name in {*described, *recorded} if described.get(name) != recorded.get(name))
            if changed:
                name = changed[0]
                raise ConfigError(
                    f"{self.directory} holds a run that was started with another config ({', '.join(changed)} changed: "
                    f"{name} was {recorded.get(name)!r} and is {described.get(name)!r}); resume it with the same one, "
                    "or give another output"
                )
        file.write_text(json.dumps(described, indent=2) + "\n")

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


def _described(config: TrainConfig) -> dict[str, Any]:
    fields = config.model_dump(mode="json", exclude=set(_FREE))
    flat: dict[str, Any] = {}
    for section, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{name}": inner for name, inner in value.items()}
        else:
            flat[section] = value
    for name in _FREE_DATA:
        flat.pop(f"data.{name}", None)
    return flat
