"""What a notebook shows: sizes and a slot table, never arrays."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_jax import StateError
from tests.pairs import SAMPLING, alone, engine, prompts

PAIR = "recall-dflash2"


@pytest.fixture
def served():
    served = engine(PAIR)
    for index in range(5):
        served.add_request(prompts(PAIR)[index], SAMPLING, request_id=f"<{index}>")
    for _ in range(4):
        served.step()
    return served


def test_engines_and_states_are_shown_by_their_sizes_and_a_slot_table(served):
    for value in (served, served.host, served.state, served.models, served.host.running.first):
        assert len(repr(value)) < 2_000, type(value)
        assert "Array(" not in repr(value)
    assert "4 running, 1 waiting" in repr(served)
    assert "4 slots, 40 pages of 16 tokens, float32" in repr(served.state)
    assert len(repr(served.state).splitlines()) == 1 + 1 + 4
    for value in (served, served.host, served.state):
        assert "<table>" in value._repr_html_() and "<0>" not in value._repr_html_()


def test_a_completion_is_a_line():
    completion = alone(PAIR, tuple(prompts(PAIR)[1]))
    assert repr(completion).startswith("Completion(id='request-0', finish_reason='length', prompt_tokens=24")
    assert "\n" not in repr(completion) and len(repr(completion)) < 300
    assert "mean_acceptance_length" in completion._repr_html_()


def test_many_requests_end_in_a_count():
    served = engine(PAIR)
    for _ in range(60):
        served.add_request([60, 1, 2])
    assert repr(served).endswith("and 44 more")


def test_a_state_whose_memory_was_used_again_says_how_to_keep_it(served):
    old, slots = served.state, served.state.slots
    served.step()
    for touch in (
        lambda: old.slots.position[0],
        lambda: np.asarray(old.target_pages.k),
        lambda: slots.position.shape,
        lambda: old.slots.position + 1,
        lambda: int(slots.anchor),
        lambda: old.rows.idx_mapping.tolist(),
    ):
        with pytest.raises(StateError, match="donate false"):
            touch()
    assert "used again by a later step" in repr(old)
    assert "4 slots" in repr(served.state)


def test_without_donation_old_states_stay():
    served = engine(PAIR, donate=False)
    served.add_request(prompts(PAIR)[1], SAMPLING)
    served.step()
    old = served.state
    served.step()
    assert int(old.slots.position[0]) == 24
