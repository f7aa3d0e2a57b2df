"""A run's directory: its manifest, its checkpoints and its feature scale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Float

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.training.config import CheckpointSection, TrainConfig
from dflash_jax.training.manifest import difference, flatten, read_manifest, write_manifest
from dflash_jax.training.run.state import TrainState
from dflash_jax.writing import replace_array

# What may change when a run is resumed, because no weight depends on it. Of the target and the data, their
# fingerprints are compared.
_MAY_CHANGE = ("output", "log_every", "tensorboard", "checkpoint", "evaluation", "pretrain")
_MAY_CHANGE_IN_DATA = ("data.path", "data.rule", "data.features")
# A setting that a record of a run does not have was at its default.
_DEFAULTS = {"target": ".", "output": ".", "draft": {}, "data": {"path": "."}, "optimiser": {"steps": 1}}

# The names of `setup.dependencies_of`, and that of the data.
_DEPENDENCIES = ("target fingerprint", "data fingerprint", "draft fingerprint", "features in bfloat16")


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
        self._manifest, self._scale = self.directory / "run.json", self.directory / "feature_scale.npy"

    @property
    def metrics(self) -> Path:
        """The run's metrics, a JSON object per line."""
        return self.directory / "metrics.jsonl"

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def begin(self, config: TrainConfig, dependencies: Mapping[str, Any]) -> None:
        """Records what the run is or, where it has checkpoints, checks that it is the recorded one.

        Args:
          config: the run's config.
          dependencies: see `setup.dependencies_of`.

        Raises:
          ConfigError: the directory holds another run.
        """
        if self.latest_step() is not None:
            self.check(config, dependencies)
        elif (self.directory / "draft").exists():
            raise ConfigError(
                f"{self.directory} holds the draft of a run whose checkpoints are gone; "
                "give another output, or remove that directory"
            )
        write_manifest(self._manifest, {**run_settings(config), **dependencies})

    def check(self, config: TrainConfig, dependencies: Mapping[str, Any]) -> None:
        """Checks that the run is the recorded one.

        Args:
          config: the run's config.
          dependencies: see `setup.dependencies_of`; one that is left out is not compared.

        Raises:
          ConfigError: it is another one, or nothing was recorded.
        """
        if not self._manifest.exists():
            raise ConfigError(
                f"{self.directory} has checkpoints but no {self._manifest.name} to say what they are of; "
                "restore it, or give another output"
            )
        recorded = read_manifest(self._manifest)
        not_given = {
            name: value for name, value in recorded.items() if name in _DEPENDENCIES and name not in dependencies
        }
        defaults = {**run_settings(TrainConfig.model_validate(_DEFAULTS)), **dependencies}
        if changed := difference({**defaults, **recorded}, {**run_settings(config), **not_given, **dependencies}):
            raise ConfigError(
                f"{self.directory} holds a run that was started with another config ({changed}); "
                "resume it with the same one, or give another output"
            )

    def save_scale(self, scale: Float[np.ndarray, " features"]) -> None:
        """Keeps what the run divides features by."""
        replace_array(self._scale, scale)

    def load_scale(self, size: int) -> Float[np.ndarray, " features"]:
        """What the run divides features by.

        Args:
          size: how many features the draft has.

        Raises:
          CheckpointError: the file is gone or damaged.
        """
        try:
            scale = np.load(self._scale)
            if scale.dtype != np.float32 or scale.shape != (size,):
                raise ValueError(f"{scale.dtype} of shape {scale.shape} instead of float32 of shape ({size},)")
            if not (np.isfinite(scale) & (scale > 0)).all():
                raise ValueError("not every number is positive and finite")
        except (OSError, ValueError, EOFError) as error:
            raise CheckpointError(
                f"{self._scale} cannot be read ({_first_line(error)}), and the run's checkpoints need it; "
                "restore it, or give another output"
            ) from None
        return scale

    def save(self, state: TrainState) -> bool:
        """Writes a checkpoint, if this step has none yet, and returns whether it had none.

        Raises:
          CheckpointError: it cannot be written; those before it stay.
        """
        step = int(state.step)
        if step == self._manager.latest_step():
            return False
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
        except Exception as error:  # Orbax raises many classes, none of its own
            raise CheckpointError(
                f"checkpoint {step} cannot be written to {self.directory} ({_first_line(error)}); "
                "what was saved before stays, and the run continues from there"
            ) from error
        return True

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
            older = [saved for saved in self._manager.all_steps() if saved != step]
            way_out = (
                f"remove {self.directory / 'checkpoints' / str(step)} to continue from step {max(older)}"
                if older
                else "it is the only one, so give another output"
            )
            raise CheckpointError(
                f"checkpoint {step} of {self.directory} cannot be restored ({_first_line(error)}); {way_out}"
            ) from error

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()


def run_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that must stay the same when a run is resumed, under dotted names."""
    flat = flatten(config.model_dump(mode="json", exclude=set(_MAY_CHANGE)))
    return {name: value for name, value in flat.items() if not name.startswith(_MAY_CHANGE_IN_DATA)}


def _first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
