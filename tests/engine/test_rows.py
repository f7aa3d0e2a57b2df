"""Row operations move requests between rows and do nothing else."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine import rows as ops
from dflash_jax.engine.invariants import leaves_with_row_axis
from dflash_jax.engine.state import Rows, init_state
from tests.pairs import models

SLOTS = 8


@st.composite
def batches(draw):
    slots = draw(st.permutations(range(SLOTS)))
    live = draw(st.lists(st.booleans(), min_size=1, max_size=SLOTS))
    return Rows(jnp.array([slot if alive else -1 for slot, alive in zip(slots, live, strict=False)], jnp.int32))


def slots_of(rows: Rows) -> list[int]:
    return [int(slot) for slot in rows.idx_mapping if slot >= 0]


def test_only_idx_mapping_has_a_row_axis():
    def make(rows):
        return init_state(models("recall-dflash2"), rows=rows, slots=6, num_pages=9, page_size=8, max_model_len=40)

    assert leaves_with_row_axis(make) == [".rows.idx_mapping"]


@given(batches())
def test_condense_brings_live_rows_to_the_front_in_order(rows):
    condensed = ops.condense(rows)
    assert slots_of(condensed) == slots_of(rows)
    live = np.asarray(condensed.idx_mapping) >= 0
    assert not np.any(np.diff(live.astype(int)) > 0)


@given(batches(), st.sets(st.integers(0, SLOTS - 1)))
def test_split_puts_the_chosen_slots_first_and_keeps_each_parts_order(rows, chosen):
    first = jnp.array([slot in chosen for slot in range(SLOTS)])
    before = slots_of(rows)
    wanted = [s for s in before if s in chosen] + [s for s in before if s not in chosen]
    assert np.asarray(ops.split(rows, first).idx_mapping).tolist() == wanted + [-1] * (
        rows.idx_mapping.shape[0] - len(wanted)
    )


@given(batches(), st.data())
def test_swap_exchanges_two_rows_and_undoes_itself(rows, data):
    row = st.integers(0, rows.idx_mapping.shape[0] - 1)
    a, b = data.draw(row), data.draw(row)
    swapped = ops.swap(rows, a, b)
    assert swapped.idx_mapping[a] == rows.idx_mapping[b]
    assert swapped.idx_mapping[b] == rows.idx_mapping[a]
    assert np.array_equal(ops.swap(swapped, a, b).idx_mapping, rows.idx_mapping)


@given(batches(), st.integers(1, 12))
def test_resize_keeps_every_live_row_that_fits(rows, size):
    condensed = ops.condense(rows)
    resized = ops.resize(condensed, size)
    assert resized.idx_mapping.shape == (size,)
    assert slots_of(resized) == slots_of(condensed)[:size]


@given(batches(), st.integers(0, SLOTS - 1))
def test_vacate_empties_one_row_only(rows, slot):
    assert slots_of(ops.vacate(rows, slot)) == [s for s in slots_of(rows) if s != slot]
