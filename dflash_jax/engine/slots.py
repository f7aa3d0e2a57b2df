"""What a plan writes into the device's state around its forward passes: slots, pages, checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.engine.inputs import DecodeInputs, PrefillInputs
from dflash_jax.engine.state import Checkpoints, EngineState, Rows


def open_slots(state: EngineState, inputs: PrefillInputs) -> EngineState:
    """The state with the rows of a prefill, whose new slots are overwritten, every field, by their entries.

    Nothing of a slot's last owner is left in it.
    """
    num_slots = state.slots.position.shape[0]
    # One past the end: a scatter in "drop" mode leaves such rows out.
    slot = jnp.where(inputs.opens & (inputs.idx_mapping >= 0), inputs.idx_mapping, num_slots)
    slots = jax.tree.map(lambda all_, new: all_.at[slot].set(new, mode="drop"), state.slots, inputs.entries)
    state = state.replace(rows=Rows(jnp.asarray(inputs.idx_mapping)), slots=slots)
    if state.processors is not None and inputs.processors is not None:
        opened = jax.tree.map(
            lambda all_, new: all_.at[slot].set(new, mode="drop"), state.processors, inputs.processors
        )
        state = state.replace(processors=opened)
    state = _activate_processors(state, inputs.processed)
    if state.recurrent is None:
        return state
    return _begin_recurrent(state, slot, inputs.loads)


def _begin_recurrent(state: EngineState, slot: Int[Array, " rows"], loads: Int[Array, " rows"]) -> EngineState:
    """The state with the recurrent state of some slots set to a checkpoint's, or to zeros where `loads` is -1."""
    assert state.recurrent is not None and state.checkpoints is not None
    loaded, index = loads >= 0, jnp.maximum(loads, 0)

    def begin(all_, kept):
        if kept.shape[1] == 0:
            return all_.at[:, slot].set(0, mode="drop")
        rows = jnp.where(loaded.reshape(1, -1, *[1] * (kept.ndim - 2)), kept[:, index], 0)
        return all_.at[:, slot].set(rows, mode="drop")

    folded = jnp.zeros_like(loads)
    if state.checkpoints.lengths.shape[0]:
        folded = jnp.where(loaded, state.checkpoints.lengths[index], 0)
    return state.replace(
        recurrent=jax.tree.map(begin, state.recurrent, state.checkpoints.states),
        slots=state.slots.replace(folded=state.slots.folded.at[slot].set(folded, mode="drop")),
    )


def save_checkpoints(state: EngineState, saves: Int[Array, " rows"]) -> EngineState:
    """The state with the rows' recurrent states kept in checkpoints; nothing is kept where `saves` is -1."""
    if state.recurrent is None or state.checkpoints is None or not state.checkpoints.lengths.shape[0]:
        return state
    slot = jnp.maximum(state.rows.idx_mapping, 0)
    index = jnp.where(saves >= 0, saves, state.checkpoints.lengths.shape[0])

    def save(kept, slots):
        return kept.at[:, index].set(slots[:, slot], mode="drop")

    kept = jax.tree.map(save, state.checkpoints.states, state.recurrent)
    lengths = state.checkpoints.lengths.at[index].set(state.slots.folded[slot], mode="drop")
    return state.replace(checkpoints=Checkpoints(kept, lengths))


def give_pages(state: EngineState, inputs: DecodeInputs) -> EngineState:
    """The state with the rows of some rounds, whose slots have their new pages in the block table."""
    table = state.slots.block_table
    idx_mapping, pages = inputs.idx_mapping[:, None], inputs.new_pages
    slot = jnp.where((idx_mapping >= 0) & (pages >= 0), idx_mapping, table.shape[0])
    logical = inputs.first_page[:, None] + jnp.arange(pages.shape[1])
    slots = state.slots.replace(block_table=table.at[slot, logical].set(pages, mode="drop"))
    state = state.replace(rows=Rows(jnp.asarray(inputs.idx_mapping)), slots=slots)
    return _activate_processors(state, inputs.processed)


def _activate_processors(state: EngineState, processed: Bool[Array, " rows"] | None) -> EngineState:
    """The state in which logits processors act on the rows that need them, and on no other slot."""
    if state.processors is None:
        return state
    none = jnp.zeros_like(state.processors.active)
    slot = jnp.where(state.rows.idx_mapping >= 0, state.rows.idx_mapping, none.shape[0])
    active = none if processed is None else none.at[slot].set(jnp.asarray(processed), mode="drop")
    return state.replace(processors=state.processors.replace(active=active))
