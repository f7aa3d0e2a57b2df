"""An engine's two halves with no requests in them."""

from __future__ import annotations

import dataclasses
import logging

import jax

from dflash_jax.engine.checkpoints import empty_checkpoints
from dflash_jax.engine.config import EngineConfig, VerifyWidth
from dflash_jax.engine.costs import Costs
from dflash_jax.engine.host import NO_LIMIT, HostState, Policy, waiting_under
from dflash_jax.engine.identity import ModelsIdentity, identify
from dflash_jax.engine.memory import divide
from dflash_jax.engine.pages import empty_pool
from dflash_jax.engine.state import EngineState, Models, init_state
from dflash_jax.engine.width import Experience, inexperienced
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import TargetConfig, check_pair

_log = logging.getLogger(__name__)


def init(
    models: Models,
    config: EngineConfig | None = None,
    *,
    k: int | None = None,
    width: VerifyWidth | None = None,
    max_context: int | None = None,
) -> tuple[HostState, EngineState]:
    """The two halves of an engine, without requests.

    Args:
      models: the target and, to speculate, the draft.
      config: sizes and options.
      k: tokens to draft in each round; the trained block_size - 1 by default.
      width: how many of them each round verifies; all by default.
      max_context: requests whose context grows past this many tokens continue without drafting.

    Raises:
      ConfigError: target and draft do not fit each other, or the sizes do not fit the models.
    """
    config = divide(config or EngineConfig(), models.target_config, models.draft_config)
    policy = make_policy(models, config, k, width, NO_LIMIT if max_context is None else max_context)
    return init_host(config, policy, identify(models), models.target_config), empty_device(models, config)


def init_host(config: EngineConfig, policy: Policy, identity: ModelsIdentity, target: TargetConfig) -> HostState:
    """The host's half, without requests."""
    checkpoints = empty_checkpoints(config.kept_states) if target.gated_delta_layers else None
    pool = empty_pool(config.pool_pages, config.page_size)
    return HostState(policy, identity, pool, checkpoints, experience=first_experience(policy))


def with_policy(host: HostState, policy: Policy) -> HostState:
    """The state under another policy; what was learnt of blocks of another length is forgotten."""
    experience, fresh = host.experience, first_experience(policy)
    if experience is None or fresh is None or len(experience.calibration.seen) != policy.k:
        experience = fresh
    return dataclasses.replace(host, policy=policy, experience=experience, waiting=waiting_under(host, policy))


def with_costs(host: HostState, costs: Costs) -> HostState:
    """The state of an engine that knows what rounds cost."""
    assert host.experience is not None
    return dataclasses.replace(host, experience=dataclasses.replace(host.experience, costs=costs))


def first_experience(policy: Policy) -> Experience | None:
    """None yet; None at all where the width is fixed."""
    return inexperienced(policy.k) if policy.k and policy.width == "auto" else None


def empty_device(models: Models, config: EngineConfig, rows: int = 1, *, processors: bool = False) -> EngineState:
    """The device's half, without requests."""
    return _init_state(
        models,
        rows=rows,
        slots=config.max_slots,
        num_pages=config.pool_pages,
        page_size=config.page_size,
        max_model_len=config.max_model_len,
        checkpoints=config.kept_states,
        processors=processors,
    )


# One program in place of one for each shape.
_init_state = jax.jit(
    init_state,
    static_argnames=("rows", "slots", "num_pages", "page_size", "max_model_len", "checkpoints", "processors"),
)


def make_policy(
    models: Models, config: EngineConfig, k: int | None, width: VerifyWidth | None, draft_limit: int
) -> Policy:
    """What plans depend on. Raises ConfigError for models and sizes that do not fit each other."""
    known = models.target_config.max_position
    if known and config.max_model_len > known:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but the target was made for at most {known} tokens "
            "(max_position_embeddings)"
        )
    drafts = _drafts(models, k)
    if drafts >= config.max_model_len:
        raise ConfigError(f"draft.k is {drafts}; it must be below engine.max_model_len {config.max_model_len}")
    return Policy(
        max_slots=config.max_slots,
        prefill_chunk=config.prefill_chunk,
        rounds_per_step=config.rounds_per_step,
        prefix_cache=config.prefix_cache,
        strict=config.strict,
        k=drafts,
        width=_checked_width(drafts, width),
        draft_limit=draft_limit,
    )


def _checked_width(drafts: int, width: VerifyWidth | None) -> VerifyWidth | None:
    """The width. Raises ConfigError if there are not so many drafted tokens."""
    if isinstance(width, int) and not 1 <= width <= drafts:
        raise ConfigError(f"draft.width is {width}; it must be from 1 to the {drafts} drafted tokens, or auto")
    return width


def _drafts(models: Models, k: int | None) -> int:
    """Tokens to draft in each round. Raises ConfigError if the models cannot."""
    if models.draft_config is None:
        if k is not None:
            raise ConfigError(f"draft.k is {k}, but there is no draft to propose tokens")
        return 0
    check_pair(models.target_config, models.draft_config)
    trained = models.draft_config.block_size - 1
    if k is None:
        return trained
    if k < 1:
        raise ConfigError(f"draft.k is {k}; it must be 1 or more, and to decode plainly there must be no draft")
    if k > trained:
        _log.warning(
            "draft.k is %d, but the draft was trained to propose %d tokens (block_size %d); what it proposes "
            "past those is little better than noise",
            k,
            trained,
            trained + 1,
        )
    return k
