"""What a round costs must not depend on the size of the page pool."""

from __future__ import annotations

import jax
import pytest

from dflash_jax.engine.state import EngineState, init_state
from dflash_jax.engine.steps import run_rounds
from tests.pairs import models

PAIR = "recall-dflash2"
ROWS = 2


def state_with(num_pages: int) -> EngineState:
    return jax.eval_shape(
        lambda: init_state(models(PAIR), rows=ROWS, slots=ROWS, num_pages=num_pages, page_size=16, max_model_len=160)
    )


def memory_of(num_pages: int, rounds: int):
    step = jax.jit(run_rounds, static_argnames=("drafts", "rounds"), donate_argnames="state")
    compiled = step.lower(models(PAIR), state_with(num_pages), drafts=7, rounds=rounds).compile()
    return compiled.memory_analysis()


def pool_bytes(state: EngineState) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.target_pages, state.draft_pages)))


@pytest.mark.parametrize("rounds", [1, 4])
def test_no_page_pool_is_copied(rounds):
    small, large = memory_of(1_000, rounds), memory_of(16_000, rounds)
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert small.temp_size_in_bytes < pool_bytes(state_with(1_000)) / 4
    assert large.alias_size_in_bytes >= pool_bytes(state_with(16_000)), "the pools are not donated"
