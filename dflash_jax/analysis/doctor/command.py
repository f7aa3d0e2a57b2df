"""A diagnosis of what a job's config names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from dflash_jax.analysis.doctor.diagnose import Say, diagnose
from dflash_jax.analysis.doctor.findings import Diagnosis, Finding
from dflash_jax.analysis.doctor.told import read_told
from dflash_jax.checkpoints.sources import resolve
from dflash_jax.engine import Engine
from dflash_jax.engine.loading import load
from dflash_jax.errors import ConfigError, RequestError, quote
from dflash_jax.jobs.config import JobConfig
from dflash_jax.jobs.reader import Item, read_items
from dflash_jax.models.config import DraftConfig, TargetConfig, check_pair


def examine(job: JobConfig, *, prompts: int = 6, max_tokens: int = 64, say: Say = lambda doing: None) -> Diagnosis:
    """Why a job's acceptance is low, by some of its prompts.

    Args:
      job: what would be run; nothing is written.
      prompts: how many of its input's prompts to run.
      max_tokens: of each answer.
      say: is told what is being done.

    Raises:
      ConfigError, CheckpointError: the models or the input cannot be read, or there is no draft.
    """
    if job.draft is None:
        raise ConfigError("the config has no draft, so there is no acceptance to look at; give it one")
    say("loading the models")
    loaded = load(job.setup)
    models = loaded["models"]
    assert models.draft_config is not None
    misfit = examine_pair(models.target_config, models.draft_config)
    if misfit is not None:
        return Diagnosis((misfit,))
    engine = Engine(**loaded)
    found = list(itertools.islice(_servable(engine, job), prompts))
    if not found:
        raise ConfigError(
            f"{quote(job.input.path)} has no prompt that can be run; mend it, and see `generate --dry-run`"
        )
    target, draft = (resolve(each.path, each.revision, each.file) for each in (job.target, job.draft))
    return diagnose(
        engine,
        found,
        sampling=job.defaults,
        max_tokens=max_tokens,
        told=read_told(draft),
        target_source=target,
        say=say,
    )


def examine_pair(target: TargetConfig, draft: DraftConfig) -> Finding | None:
    """What makes a draft and a target impossible together; None if nothing does."""
    try:
        check_pair(target, draft)
    except ConfigError as error:
        causes = {"vocab_size": "vocabulary", "mask_token_id": "mask_token", "target_layer": "feature_layers"}
        cause = next((cause for word, cause in causes.items() if word in str(error)), "pair")
        return Finding(cause, "problem", str(error))
    return None


def _servable(engine: Engine, job: JobConfig) -> Iterator[Any]:
    room = engine.config.max_model_len
    for item in read_items(job.input.path, job.defaults):
        if not isinstance(item, Item):
            continue
        try:
            if 0 < len(engine.tokenize(item.prompt)) < room:
                yield item.prompt
        except RequestError:
            continue
