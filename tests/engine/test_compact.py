"""An engine whose weights stay as the checkpoint has them says what one with widened weights says."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from dflash_jax import Engine
from dflash_jax.checkpoints import load_draft, save_draft, save_target
from dflash_jax.engine import EngineConfig, cost_files
from dflash_jax.engine.costs import Costs, Round
from dflash_jax.engine.state import Models
from dflash_jax.errors import ConfigError
from dflash_jax.kernels import native
from dflash_jax.kernels.compact import Compact, compact
from dflash_jax.models.matrix import Matrix, map_matrices
from tests.pairs import SIZES, models, prompts

needs_native = pytest.mark.usefixtures("native_code")
PAIR = "recall-dflash2"


def held(tree):
    return [
        node for node in jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, Compact)) if isinstance(node, Compact)
    ]


def eight_bits(values):
    """A matrix in 8 bits with a scale for each output."""
    values = np.asarray(values, np.float32)
    scales = np.abs(values).max(1, keepdims=True) / 127
    return compact(np.round(values / scales).astype(np.int8), "I8", scales, values.shape[1])


def in_eight_bits(pair):
    target = map_matrices(lambda matrix: Matrix(eight_bits(matrix.out_in), "out_in"), pair.target)
    return pair.replace(target=target.replace(embedding=eight_bits(pair.target.embedding)))


def widened(pair):
    target = map_matrices(lambda matrix: Matrix(matrix.out_in, "out_in"), pair.target)
    return pair.replace(target=target.replace(embedding=pair.target.embedding.astype("float32")))


def answers(pair: Models, implementation=None, draft=True, **sizes):
    if not draft:
        pair = pair.replace(draft=None, draft_config=None)
    engine = Engine(pair, EngineConfig(**{**SIZES, **sizes}), implementation=implementation)
    found = []
    for temperature in (0.0, 0.8):
        sampling = {"max_tokens": 24, "ignore_eos": True, "temperature": temperature, "seed": 5}
        found += [done.token_ids for done in engine.generate(prompts(PAIR)[:2], sampling)]
    return found


@needs_native
def test_tokens_are_those_of_the_widened_weights_and_of_plain_decoding():
    pair = in_eight_bits(models(PAIR))
    assert len(held(pair.target)) > 10
    expected = answers(widened(pair))
    assert answers(pair) == expected
    assert answers(pair, draft=False)[:2] == expected[:2]


def test_plain_xla_serves_them_too():
    pair = in_eight_bits(models(PAIR))
    assert answers(pair, "xla") == answers(widened(pair), "xla")


def with_draft(directory, weights):
    """Tokens and drafted blocks of a configuration whose draft is held so, and the formats of its matrices."""
    target = {"path": "tests/golden/recall-target"}
    draft = {"path": str(directory), "width": 7, "weights": weights}
    engine = Engine.from_config({"target": target, "draft": draft, "engine": SIZES})
    done = engine.generate(prompts(PAIR)[:3], {"max_tokens": 24, "ignore_eos": True})
    formats = {matrix.format for matrix in held(engine.models.draft)}
    return [each.token_ids for each in done], [each.drafted_blocks for each in done], formats


@needs_native
def test_a_draft_may_be_held_in_fewer_bits_than_its_target(tmp_path):
    pair = models(PAIR)
    save_draft(tmp_path / "d", pair.draft_config, pair.draft, "bfloat16")
    tokens, blocks, formats = with_draft(tmp_path / "d", "float32")
    assert formats == set()
    assert with_draft(tmp_path / "d", None) == (tokens, blocks, {"BF16"}), "values are the same"
    same_tokens, others, formats = with_draft(tmp_path / "d", "int8")
    assert (same_tokens, formats) == (tokens, {"I8"})
    rounds, fewer = (sum(map(len, each)) for each in (blocks, others))
    assert fewer <= 1.2 * rounds, "it drafts about as well"


@needs_native
def test_costs_are_kept_apart_by_how_weights_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_files, "own_cache", lambda: tmp_path / "cache")
    pair = models(PAIR)
    save_draft(tmp_path / "d", pair.draft_config, pair.draft, "bfloat16")
    drafts = [load_draft(tmp_path / "d", weights=weights).params for weights in ("file", "float32")]
    short, wide = (Engine(pair.replace(draft=draft), EngineConfig(**SIZES), width="auto") for draft in drafts)
    assert short.host.models == wide.host.models, "they are the same models"
    costs = Costs().with_round(Round(1, 8, True, 0), 1.0)
    short._costs.write(
        dataclasses.replace(short.host, experience=dataclasses.replace(short.host.experience, costs=costs))
    )
    assert short._costs.read(short.host).samples == costs.samples
    assert not wide._costs.read(wide.host).samples


@needs_native
@pytest.mark.parametrize(("weights", "formats"), [(None, {"BF16"}), ("file", {"BF16"}), ("float32", set())])
def test_a_config_says_how_weights_are_held(tmp_path, weights, formats):
    pair = models(PAIR)
    save_target(tmp_path / "m", pair.target_config, pair.target, "bfloat16")
    target = {"path": str(tmp_path / "m")} | ({} if weights is None else {"weights": weights})
    engine = Engine.from_config({"target": target, "engine": SIZES})
    assert {matrix.format for matrix in held(engine.models.target)} == formats
    assert engine.state.target_pages.k.dtype == "float32"


def test_without_native_code_they_are_widened_when_loaded_unless_the_config_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    pair = models(PAIR)
    save_target(tmp_path / "m", pair.target_config, pair.target, "bfloat16")
    target = {"path": str(tmp_path / "m")}
    assert held(Engine.from_config({"target": target, "engine": SIZES}).models.target) == []
    kept = Engine.from_config({"target": {**target, "weights": "file"}, "engine": SIZES})
    assert held(kept.models.target)


def test_weights_that_activations_cannot_have_are_refused(tmp_path):
    pair = models(PAIR)
    save_target(tmp_path / "m", pair.target_config, pair.target)
    config = {"target": {"path": str(tmp_path / "m"), "weights": "float32"}, "engine": {**SIZES, "dtype": "bfloat16"}}
    with pytest.raises(ConfigError, match="weights of float32 need activations of float32"):
        Engine.from_config(config)


@needs_native
def test_a_snapshot_goes_from_one_to_the_other(tmp_path):
    pair = in_eight_bits(models(PAIR))
    served = Engine(pair, EngineConfig(**SIZES))
    served.add_request(prompts(PAIR)[0], {"max_tokens": 24, "ignore_eos": True})
    served.step()
    served.snapshot(tmp_path / "snapshot")
    restored = Engine.restore(tmp_path / "snapshot", Engine(widened(pair), EngineConfig(**SIZES)))
    ends = []
    for engine in (served, restored):
        tokens = []
        while engine.has_work:
            tokens += [token for update in engine.step() for token in update.token_ids]
        ends.append(tokens)
    assert ends[0] == ends[1] != []
