"""Engines that continue another's requests: with the same models, another draft, or another number of drafts.

Functions of runners and of the host's half; `Engine.fork` and `Engine.restore` put the results together.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dflash_jax.checkpoints import LoadedDraft, load_draft
from dflash_jax.engine.config import EngineConfig, EngineSetup, VerifyWidth
from dflash_jax.engine.device import prepare
from dflash_jax.engine.host import HostState, restart, waiting_under
from dflash_jax.engine.init import make_policy, with_policy
from dflash_jax.engine.run import Runner
from dflash_jax.engine.state import Models
from dflash_jax.errors import CheckpointError

Draft = str | Path | LoadedDraft
"""The path of a draft, or a loaded one."""


def with_draft(run: Runner, draft: Draft | None, dtype: str) -> Runner:
    """A runner of the same target with another draft, or with none.

    Raises:
      CheckpointError: the draft cannot be read.
    """
    if isinstance(draft, str | Path):
        draft = load_draft(draft, dtype)
    params, config = (None, None) if draft is None else (draft.params, draft.config)
    models = run.models.replace(draft=params, draft_config=config, shortlist=None)
    return Runner(
        prepare(models, run.implementation),
        donate=run.donate,
        implementation=run.implementation,
        target=run.identity.target,
        grammars=run.grammars,
    )


def width_within(width: VerifyWidth | None, k: int) -> VerifyWidth | None:
    """The width for `k` drafted tokens that is most like another."""
    return min(width, k) if isinstance(width, int) else width


def with_drafting(
    host: HostState, models: Models, config: EngineConfig, k: int, width: VerifyWidth | None
) -> HostState:
    """The same requests with another number of tokens drafted, or verified, in each round.

    Raises:
      ConfigError: the models cannot draft that many, or less are drafted than are to be verified.
    """
    policy = make_policy(models, config, k, width, host.policy.draft_limit)
    return with_policy(host, dataclasses.replace(policy, max_slots=host.policy.max_slots))


def setup_with_drafting(setup: EngineSetup | None, k: int, width: VerifyWidth | None) -> EngineSetup | None:
    """What a snapshot is restored from, with the same change."""
    if setup is None or setup.draft is None:
        return setup
    return setup.model_copy(update={"draft": setup.draft.model_copy(update={"k": k, "width": width})})


def recompute(host: HostState, empty: HostState) -> HostState:
    """An engine's requests in another one of the same target, waiting to have their contexts computed again.

    Args:
      host: the requests.
      empty: the other engine's half, without requests.
    """
    policy = dataclasses.replace(empty.policy, max_slots=host.policy.max_slots)
    # As large as the other engine's device state, whatever this one's was.
    pool = dataclasses.replace(host.pool, num_pages=empty.pool.num_pages, page_size=empty.pool.page_size)
    host = restart(dataclasses.replace(host, pool=pool, checkpoints=empty.checkpoints))
    waiting = waiting_under(host, policy)
    return dataclasses.replace(host, policy=policy, models=empty.models, waiting=waiting, experience=empty.experience)


def check_target(wrote: HostState, reads: HostState, directory: str | Path) -> None:
    """Refuses a snapshot of another target for `recompute`.

    Raises:
      CheckpointError: it is of another; the message names both.
    """
    if wrote.models.target != reads.models.target:
        raise CheckpointError(
            f"{directory} was taken with {wrote.models.target}, and the target here is {reads.models.target}; only the "
            "draft may be another"
        )
