"""Rows are where requests sit in one step; nothing that outlives the step is kept by row."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_jax.engine.inputs import decode_inputs
from dflash_jax.engine.invariants import leaves_with_row_axis
from dflash_jax.engine.plan import Decode, Plan, make_plan
from dflash_jax.engine.state import init_state
from tests.pairs import SAMPLING, engine, models, prompts

PAIR = "recall-dflash2"


def test_only_idx_mapping_has_a_row_axis():
    of = models(PAIR)

    def make(rows):
        return init_state(of, rows=rows, slots=6, num_pages=9, page_size=8, max_model_len=40)

    assert leaves_with_row_axis(make) == [".rows.idx_mapping"]


@pytest.mark.parametrize(
    ("order", "mapping"),
    [([0, 1, 2], [5, 2, 7]), ([2, 0, 1], [7, 5, 2]), ([1], [2]), ([-1, 0, -1, 2], [-1, 5, -1, 7]), ([], [])],
)
def test_a_permuted_plan_is_a_gather_of_its_rows(order, mapping):
    plan = Plan(decodes=tuple(Decode(str(slot), slot) for slot in (5, 2, 7)))
    permuted = plan.permuted([], order)
    assert decode_inputs(permuted).idx_mapping.tolist() == mapping


def test_idx_mapping_is_written_whole_from_the_plan():
    """Whatever a state says of rows, the next step does not read it."""
    served = engine(PAIR)
    for index in (1, 2, 3):
        served.add_request(prompts(PAIR)[index], SAMPLING)
    while not all(sequence.decoding for sequence in served.host.in_flight):
        served.step()
    served.state = served.state.replace(rows=served.state.rows.replace(idx_mapping=np.array([3, 3, 3, 3], np.int32)))
    served.step()
    assert np.asarray(served.state.rows.idx_mapping).tolist() == [0, 1, 2, -1]


def test_decodes_and_chunks_are_rows_of_their_own_and_fill_a_bucket():
    served = engine(PAIR, prefill_chunk=16)
    for index in (1, 2, 1):
        served.add_request(prompts(PAIR)[index], SAMPLING)
    while not all(sequence.decoding for sequence in served.host.in_flight):
        served.step()
    served.add_request((prompts(PAIR)[4] * 2)[:64], SAMPLING, request_id="long")
    _, plan = make_plan(served.host)
    assert [row and row.slot for row in plan.decodes] == [0, 1, 2, None]
    assert [row.id for row in plan.chunks] == ["long"]
    assert plan.chunks[0].opening is not None
    served.step()
    _, plan = make_plan(served.host)
    assert plan.chunks[0].opening is None, "a slot is opened once"
