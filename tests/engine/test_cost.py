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


def models_in(dtype: str) -> Models:
    return jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf.astype(dtype), models(PAIR)))


def state_with(num_pages: int, dtype: str) -> EngineState:
    sizes = {"rows": ROWS, "slots": ROWS, "num_pages": num_pages, "page_size": 16, "max_model_len": 160}
    return jax.eval_shape(lambda of: init_state(of, **sizes), models_in(dtype))


def prefill_chunk(of: Models, state: EngineState):
    count = jnp.full(ROWS, 8, jnp.int32)
    return prefill(of, state, jnp.zeros((ROWS, 8), jnp.int32), count, count > 0, -count)


STEPS = {
    "one round": functools.partial(run_rounds, drafts=7, rounds=1),
    "four rounds": functools.partial(run_rounds, drafts=7, rounds=4),
    "prefill": prefill_chunk,
}


def memory_of(num_pages: int, step: str, dtype: str):
    compiled = jax.jit(STEPS[step], donate_argnums=1).lower(models_in(dtype), state_with(num_pages, dtype)).compile()
    return compiled.memory_analysis()


def pool_bytes(state: EngineState) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.target_pages, state.draft_pages)))


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", STEPS)
def test_no_page_pool_is_copied(step, dtype):
    small, large = memory_of(1_000, step, dtype), memory_of(16_000, step, dtype)
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert small.temp_size_in_bytes < pool_bytes(state_with(1_000, dtype)) / 4
    assert large.alias_size_in_bytes >= pool_bytes(state_with(16_000, dtype)), "the pools are not donated"
