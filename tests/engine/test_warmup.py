"""What an engine compiles: few programs, ahead if it is asked to, and none of them twice."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dflash_jax import Engine
from dflash_jax.compiling import CompileWatch
from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.warmup import possible_plans
from dflash_jax.programs import clear_programs
from tests.pairs import SAMPLING, engine
from tests.pairs import models as models_of

PAIR = "recall-dflash2"


@pytest.fixture(autouse=True)
def nothing_compiled():
    clear_programs()
    # It holds what was lowered and compiled before, as well.
    jax.clear_caches()


def traffic(count: int, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(2, 60, size=int(size)).tolist() for size in draw.integers(3, 70, size=count)]


def test_after_a_warm_up_requests_compile_nothing():
    served = engine(PAIR, slots=3, prefill_chunk=32)
    served.warmup(plain=3)
    with CompileWatch() as watch:
        served.generate(traffic(8), {**SAMPLING, "max_tokens": 12})
        served.generate(traffic(3, seed=1), {**SAMPLING, "max_tokens": 5, "speculation": False})
    assert watch.programs == 0


def test_a_warm_up_changes_nothing_and_makes_nothing_twice():
    served = engine(PAIR, slots=2, prefill_chunk=32)
    served.add_request(traffic(1)[0], SAMPLING)
    served.step()
    host, state = served.host, served.state
    served.warmup()
    assert served.host is host and served.state is state
    with CompileWatch() as watch:
        served.warmup()
    assert watch.programs == 0


def test_a_step_needs_no_program_of_its_own_for_the_rows_of_the_step_before():
    served = engine(PAIR, max_slots=5, prefill_chunk=32)
    with CompileWatch() as watch:
        served.generate(traffic(12), {**SAMPLING, "max_tokens": 9})
    assert 0 < watch.programs <= len(possible_plans(served.host, plain=5))


def test_fewer_requests_than_slots_need_fewer_programs():
    served = engine(PAIR, max_slots=8)

    def rows(drafted: bool, **load):
        plans = [plan for plan in possible_plans(served.host, **load) if plan.decodes]
        return sorted({len(plan.decodes) for plan in plans if (plan.drafts > 0) == drafted})

    assert rows(True) == [1, 2, 4, 8] and rows(True, requests=3) == [1, 2, 4]
    assert rows(False, requests=1, plain=2)[-1] == 2 and rows(True, requests=1, plain=2) == [1]


@pytest.mark.parametrize("warmup", [True, False])
def test_the_config_says_whether_an_engine_is_made_warm(warmup):
    golden = "tests/golden/"
    served = Engine.from_config(
        {
            "target": {"path": golden + "recall-target"},
            "draft": {"path": golden + PAIR},
            "engine": EngineConfig(max_slots=1, max_model_len=96, warmup=warmup).model_dump(),
        }
    )
    with CompileWatch() as watch:
        served.generate(traffic(1), {"max_tokens": 8})
    assert (watch.programs == 0) == warmup


def test_loading_and_making_an_engine_compile_few_programs():
    """Weights are laid out as they are read, and an empty state is one program."""
    of = models_of(PAIR)
    Engine(of, EngineConfig(max_slots=2, max_model_len=64))
    with CompileWatch() as watch:
        Engine(of, EngineConfig(max_slots=3, max_model_len=80))
    assert watch.programs <= 1
