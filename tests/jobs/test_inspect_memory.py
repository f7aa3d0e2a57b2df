"""The memory that `inspect` tells beforehand is what an engine then holds."""

from __future__ import annotations

import jax
import pytest

from dflash_jax import Engine
from dflash_jax.checkpoints import save_target
from dflash_jax.engine import EngineConfig
from dflash_jax.jobs.inspect import inspect_checkpoint
from tests.pairs import GOLDEN, models


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_told_memory_is_what_an_engine_of_32_slots_holds(dtype):
    target, draft = str(GOLDEN / "recall-target"), str(GOLDEN / "recall-dflash2")
    sizes = {"max_slots": 32, "max_model_len": 160, "dtype": dtype}
    told = inspect_checkpoint(target, draft=draft, k=8, engine=EngineConfig(**sizes))
    engine = Engine.from_config({"target": {"path": target}, "draft": {"path": draft, "k": 8}, "engine": sizes})
    # A tied head and its embedding are one.
    held = sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves((engine.models, engine.state))}.values())
    total = told.memory.total
    assert total == pytest.approx(held, rel=0.05)


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("weights", [None, "file", "float32", "bfloat16", "int8"])
def test_the_told_memory_is_that_of_weights_as_they_are_held(weights, tmp_path):
    pair = models(None)
    target = str(save_target(tmp_path / "m", pair.target_config, pair.target, "bfloat16"))
    sizes = {"max_slots": 1, "max_model_len": 16}
    told = inspect_checkpoint(target, engine=EngineConfig(**sizes), weights=weights).memory.weights
    engine = Engine.from_config({"target": {"path": target, "weights": weights}, "engine": sizes})
    held = sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(engine.models)}.values())
    assert told == pytest.approx(held, rel=0.01)
