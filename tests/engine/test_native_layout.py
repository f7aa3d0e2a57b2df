"""How an engine lays its models out for native code, and that this changes nothing but its speed."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig
from dflash_jax.checkpoints import save_draft, save_target
from dflash_jax.checkpoints.orbax_io import restore_params, save_params
from dflash_jax.engine import Models, device
from dflash_jax.kernels import native
from dflash_jax.models.lm_head import make_shortlist, target_head
from dflash_jax.models.matrix import is_matrix
from dflash_jax.models.target import extend
from dflash_jax.training.precision import rounded
from tests.pairs import SAMPLING, SIZES, models

pytestmark = pytest.mark.usefixtures("native_code")

PAIR = "recall-dflash2"
MODELS = models(PAIR)
TIED = MODELS.replace(target=MODELS.target.replace(lm_head=None))
PROMPTS = [[60, 1, 2, 33, 4, 5], [60, 9, 2, 8]]


def listed(of):
    return of.replace(shortlist=make_shortlist(of.target, range(0, 64, 2)))


def test_matrices_lie_a_row_per_output_and_all_else_as_before():
    before, after = listed(MODELS), device.prepare(listed(MODELS), None)
    found = [node for node in jax.tree.leaves(after, is_leaf=is_matrix) if is_matrix(node)]
    assert {matrix.layout for matrix in found} == {"out_in"}
    for path in ("target.lm_head", "draft.fc", "draft.selector.hidden_projection", "shortlist.weight"):
        one, other = (operator.attrgetter(path)(of) for of in (before, after))
        np.testing.assert_array_equal(one.value, other.value.T)
    np.testing.assert_array_equal(
        after.target.layers[0].mlp.up_proj.weight.value, before.target.layers[0].mlp.up_proj.weight.value.T
    )
    assert after.draft.selector.successor_codebook is before.draft.selector.successor_codebook
    assert after.target.norm is before.target.norm


def test_a_tied_head_lies_so_already_and_is_not_copied():
    after = device.prepare(TIED, None).target
    assert target_head(after).weight.value is after.embedding is TIED.target.embedding
    assert target_head(after).weight.layout == "out_in"


def test_preparing_is_idempotent_and_undone_by_another_implementation(monkeypatch):
    after = device.prepare(MODELS, None)
    assert device.prepare(after, None) is after
    later = device.prepare(listed(after), None)
    assert later.shortlist.weight.layout == "out_in" and later.draft.fc is after.draft.fc
    for implementation in ("xla", "reference", "mosaic_gpu"):
        assert device.prepare(MODELS, implementation) is MODELS
        jax.tree.map(np.testing.assert_array_equal, device.prepare(after, implementation), MODELS)
    monkeypatch.setattr(native, "available", lambda: False)
    assert device.prepare(MODELS, None) is MODELS
    jax.tree.map(np.testing.assert_array_equal, device.prepare(after, None), MODELS)


@pytest.mark.parametrize("of", [MODELS, TIED], ids=["", "tied"])
def test_a_shortlist_of_prepared_models_is_the_shortlist(of):
    one, other = (make_shortlist(target, [3, 1, 60]) for target in (of.target, device.prepare(of, None).target))
    np.testing.assert_array_equal(one.weight.in_out, other.weight.in_out)
    assert one.tokens.tolist() == other.tokens.tolist() == [1, 3, 60]


def test_an_engine_takes_the_models_of_another_whatever_its_implementation():
    served = Engine(MODELS, EngineConfig(**SIZES), k=3)
    [wanted] = served.generate([PROMPTS[0]], SAMPLING)
    for implementation in ("xla", "native", None):
        other = Engine(served.models, EngineConfig(**SIZES), k=3, implementation=implementation)
        [found] = other.generate([PROMPTS[0]], SAMPLING)
        assert (found.token_ids, found.drafted_blocks) == (wanted.token_ids, wanted.drafted_blocks)


def test_models_of_an_engine_are_saved_as_those_it_was_made_of(tmp_path):
    served = Engine(MODELS, EngineConfig(**SIZES), k=3)
    for name, of in (("engine", served.models), ("loaded", MODELS)):
        save_target(tmp_path / name / "target", of.target_config, of.target)
        save_draft(tmp_path / name / "draft", of.draft_config, of.draft)
        save_params(tmp_path / name / "orbax", of.target_config, of.target)
    for part in ("target", "draft"):
        one, other = (tmp_path / name / part / "model.safetensors" for name in ("engine", "loaded"))
        assert one.read_bytes() == other.read_bytes()
    _, restored = restore_params(tmp_path / "engine" / "orbax")
    jax.tree.map(np.testing.assert_array_equal, restored, MODELS.target)


@pytest.mark.parametrize("of", [MODELS, TIED], ids=["", "tied"])
def test_an_engine_takes_models_prepared_for_training(of):
    """As `data generate` with dtype bfloat16 does."""
    target = rounded(of.target, "bfloat16")
    served = Engine(Models(target, of.target_config), EngineConfig(**SIZES))
    [completion] = served.generate([PROMPTS[0]], SAMPLING)
    assert len(completion.token_ids) == SAMPLING["max_tokens"]
    matrices = [x for x in jax.tree.leaves(served.models.target.layers, is_leaf=is_matrix) if is_matrix(x)]
    assert all(x.mixed and x.layout == "out_in" and x.dtype == jnp.bfloat16 for x in matrices)
    again = rounded(served.models.target, "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, again, served.models.target)


@pytest.mark.parametrize("of", [MODELS, TIED, listed(MODELS), listed(TIED)], ids=["", "tied", "listed", "tied listed"])
def test_tokens_and_drafts_are_the_same(of):
    def completions(implementation):
        served = Engine(of, EngineConfig(**SIZES), k=3, implementation=implementation)
        return served.generate(PROMPTS, SAMPLING)

    for native_, other in zip(completions(None), completions("xla"), strict=True):
        assert native_.token_ids == other.token_ids
        assert native_.drafted_blocks == other.drafted_blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_blocks_states_are_the_same_bits_as_those_of_its_tokens_one_by_one(dtype):
    """Verification then decides as plain decoding does, near ties included, as long as both take native code."""
    of = jax.tree.map(lambda leaf: leaf.astype(dtype), MODELS)
    served = Engine(of, EngineConfig(**SIZES), k=3)
    served.add_request(PROMPTS[0], SAMPLING)
    served.step()
    target, config = served.models.target, served.models.target_config
    state = served.state
    mapping = state.rows.idx_mapping
    layers = tuple(range(config.num_layers))

    @jax.jit
    def run(state, tokens):
        context = state.target_context(mapping)
        count = jnp.full(tokens.shape, tokens.shape[1])[:, 0] * (mapping >= 0)
        ran = extend(target, config, context, tokens, count, feature_layers=layers)
        slots = state.slots.replace(position=state.slots.position.at[mapping].add(count))
        return ran, state.replace(target_pages=context.write(ran.entries, count), slots=slots)

    block = jnp.tile(jnp.asarray([[7, 30, 2, 51]]), (len(mapping), 1))
    together, _ = run(state, block)
    for index in range(block.shape[1]):
        alone, state = run(state, block[:, index : index + 1])
        for one, many in ((alone.features, together.features), (alone.hidden, together.hidden)):
            np.testing.assert_array_equal(one[:1, 0], many[:1, index])


@pytest.mark.parametrize("of", [MODELS, TIED], ids=["", "tied"])
@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", "out_in"), ("float16", "in_out")])
def test_other_dtypes_decode_too(of, dtype, layout):
    short = jax.tree.map(lambda leaf: leaf.astype(dtype), of)
    assert device.prepare(short, None).draft.fc.layout == layout
    [completion] = Engine(short, EngineConfig(**SIZES), k=3).generate([PROMPTS[0]], SAMPLING)
    assert len(completion.token_ids) == SAMPLING["max_tokens"]
