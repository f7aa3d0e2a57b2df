"""From a configuration to loaded models: all that an engine is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import jax.numpy as jnp

from dflash_jax.checkpoints import Tokenizer, load_draft, load_target
from dflash_jax.checkpoints.shortlist import read_shortlist
from dflash_jax.engine.config import EngineConfig, EngineSetup, HeldSource, VerifyWidth
from dflash_jax.engine.device import default_weights, fastest_layout
from dflash_jax.engine.device_memory import check_memory
from dflash_jax.engine.memory import divide
from dflash_jax.engine.state import Models
from dflash_jax.models.lm_head import make_shortlist
from dflash_jax.settings import parse, read_settings

_JOB_SECTIONS = ("sampling", "input", "output", "report")


class Loaded(TypedDict):
    """Arguments of `Engine`."""

    models: Models
    config: EngineConfig
    tokenizer: Tokenizer | None
    k: int | None
    width: VerifyWidth | None
    max_context: int | None


def read_setup(config: Mapping[str, Any] | EngineSetup | str | Path) -> EngineSetup:
    """A configuration as it was given, or the YAML file that it is in; what a job's file says beyond it is left out.

    Raises:
      ConfigError: it is not one.
    """
    if isinstance(config, str | Path):
        values = {name: value for name, value in read_settings(config).items() if name not in _JOB_SECTIONS}
        return parse(EngineSetup, values, str(config))
    return config if isinstance(config, EngineSetup) else parse(EngineSetup, config, "config")


def load(setup: EngineSetup) -> Loaded:
    """The models that a configuration names, and the sizes that it leaves them.

    Raises:
      ConfigError, CheckpointError: it cannot be done; the message says why.
    """
    how: dict[str, Any] = dict(dtype=setup.engine.dtype, layout=fastest_layout(jnp.dtype(setup.engine.dtype), None))
    target = load_target(**_from(setup.target), **how)
    tokenizer = setup.target.configure_tokenizer(target.tokenizer)
    models = Models(target.params, target.config)
    k = width = max_context = None
    if setup.draft is not None:
        draft = load_draft(**_from(setup.draft), **how, mask_token_id=setup.draft.mask_token_id)
        models = models.replace(draft=draft.params, draft_config=draft.config)
        if setup.draft.shortlist is not None:
            tokens = read_shortlist(setup.draft.shortlist, target.config.vocab_size, draft.config.candidates)
            models = models.replace(shortlist=make_shortlist(target.params, tokens))
        k, width, max_context = setup.draft.k, setup.draft.width, setup.draft.max_context
    sizes = divide(setup.engine, models.target_config, models.draft_config)
    check_memory(models, sizes)
    return Loaded(models=models, config=sizes, tokenizer=tokenizer, k=k, width=width, max_context=max_context)


def _from(source: HeldSource) -> dict[str, Any]:
    return {**source.arguments(), "weights": source.weights or default_weights()}
