"""What a round and a prefill cost must not depend on the size of the page pool."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.engine.state import EngineState, Models, init_state
from dflash_jax.engine.steps import prefill, run_rounds
from tests.pairs import models

PAIR = "recall-dflash2"
ROWS = 2


def state_with(num_pages: int) -> EngineState:
    return jax.eval_shape(
        lambda: init_state(models(PAIR), rows=ROWS, slots=ROWS, num_pages=num_pages, page_size=16, max_model_len=160)
    )


def prefill_chunk(of: Models, state: EngineState):
    count = jnp.full(ROWS, 8, jnp.int32)
    return prefill(of, state, jnp.zeros((ROWS, 8), jnp.int32), count, count > 0, -count)


STEPS = {
    "one round": functools.partial(run_rounds, drafts=7, rounds=1),
    "four rounds": functools.partial(run_rounds, drafts=7, rounds=4),
    "prefill": prefill_chunk,
}


def memory_of(num_pages: int, step: str):
    compiled = jax.jit(STEPS[step], donate_argnums=1).lower(models(PAIR), state_with(num_pages)).compile()
    return compiled.memory_analysis()


def pool_bytes(state: EngineState) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.target_pages, state.draft_pages)))


@pytest.mark.parametrize("step", STEPS)
def test_no_page_pool_is_copied(step):
    small, large = memory_of(1_000, step), memory_of(16_000, step)
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert small.temp_size_in_bytes < pool_bytes(state_with(1_000)) / 4
    assert large.alias_size_in_bytes >= pool_bytes(state_with(16_000)), "the pools are not donated"
