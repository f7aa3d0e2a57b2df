"""A run's newest checkpoint as a draft that others can load."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax.checkpoints import load_target, save_draft
from dflash_jax.errors import CheckpointError
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.drafts.feature_scale import unscale_features
from dflash_jax.training.drafts.init import fresh_params
from dflash_jax.training.drafts.start import starting_draft
from dflash_jax.training.optimiser import make_optimiser
from dflash_jax.training.run.setup import dependencies_of
from dflash_jax.training.run.state import initial_state
from dflash_jax.training.run.store import RunStore


def export_draft(config: TrainConfig, directory: str | Path, dtype: str = "bfloat16") -> int:
    """Exports the newest checkpoint of a run, which may be going on, in Hugging Face layout.

    Returns:
      The step it is of.

    Raises:
      CheckpointError: the run has no checkpoint, or the directory is not empty.
      ConfigError: the run was started with another config.
    """
    nothing = CheckpointError(f"there is no checkpoint in {config.output} to export; train first")
    if not config.output.exists():
        raise nothing
    with closing(RunStore(config.output, config.checkpoint)) as store:
        step = store.latest_step()
        if step is None:
            raise nothing
        target = load_target(config.target, "float32")
        start, draft_config = starting_draft(config, target)
        store.check(config, dependencies_of(config, target, start, draft_config))
        key = jax.random.key(config.seed)
        if start is None:
            start = fresh_params(key, draft_config, config.init, target.params, target.config)
        like = initial_state(start, make_optimiser(config.optimiser, config.dtype), key)
        state = store.restore(like)
        save_draft(
            directory,
            draft_config,
            unscale_features(
                state.params,
                jnp.asarray(store.load_scale(draft_config.hidden_size * len(draft_config.target_layer_ids))),
            ),
            dtype,
        )
        return step
