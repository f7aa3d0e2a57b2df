"""What must hold, by name.

Facts about single rows are computed inside every step, always, and come back as data: a violated row
does nothing, and the other rows proceed. What is wrong with the host's bookkeeping or the structure raises.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.engine.state import EngineState


class Violation(enum.IntEnum):
    """Which invariant a slot broke; the names are public."""

    none = 0
    context_continuity = 1
    slot_exclusive = 2
    block_table_covers = 3
    position_monotone = 4
    finite_logits = 5
    recurrent_continuity = 6
    token_allowed = 7


MEANING = {
    Violation.context_continuity: "a slot drafts only from a context that holds every token before its anchor",
    Violation.slot_exclusive: "a live slot is in one row at most",
    Violation.block_table_covers: "pages exist for every token a step may commit",
    Violation.position_monotone: "a slot's position only grows, by what was committed",
    Violation.recurrent_continuity: "a slot's recurrent state has taken in each token before its position, no other",
    Violation.finite_logits: "the target's logits are finite numbers",
    Violation.token_allowed: "a request's sampling parameters allow at least one token at each position",
}


def violations(
    state: EngineState,
    idx_mapping: Int[Array, " rows"],
    drafting: Bool[Array, " rows"],
    most_committed: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """The `Violation` of each row, before a step acts on it; 0 where all is well or the row is empty.

    Args:
      state: the engine's state.
      idx_mapping: the step's rows.
      drafting: rows that will draft, or extend the context they will draft from.
      most_committed: tokens the step may commit, at most, per row.
    """
    slots = state.slots
    live = idx_mapping >= 0
    slot = jnp.maximum(idx_mapping, 0)

    continuous = ~drafting | (slots.draft_len[slot] == slots.position[slot])

    folded = jnp.ones_like(live)
    if state.recurrent is not None:
        folded = slots.folded[slot] == slots.position[slot]

    same = (idx_mapping[:, None] == idx_mapping) & live[:, None]
    exclusive = same.sum(1) <= 1

    num_pages, page_size = state.target_pages.k.shape[1:3]
    table = slots.block_table[slot]
    end = slots.position[slot] + most_committed
    needed = jnp.arange(table.shape[1]) * page_size < end[:, None]
    exists = (table >= 0) & (table < num_pages)
    covered = jnp.all(exists | ~needed, axis=1) & (end <= table.shape[1] * page_size)

    monotone = (slots.position[slot] >= 0) & (most_committed > 0)

    found = jnp.zeros(idx_mapping.shape, jnp.int32)
    for holds, code in (
        (monotone, Violation.position_monotone),
        (covered, Violation.block_table_covers),
        (exclusive, Violation.slot_exclusive),
        (folded, Violation.recurrent_continuity),
        (continuous, Violation.context_continuity),
    ):
        found = jnp.where(holds, found, int(code))
    return jnp.where(live, found, 0)


def leaves_with_row_axis(make_state: Callable[[int], EngineState]) -> list[str]:
    """Names of the state's leaves whose shape depends on the number of rows; `one_row_axis` wants one.

    Args:
      make_state: builds a state, or its abstract shapes, with the given number of rows.
    """
    few, more = (jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda n=n: make_state(n))) for n in (3, 4))
    return [jax.tree_util.keystr(path) for (path, a), (_, b) in zip(few, more, strict=True) if a.shape != b.shape]
