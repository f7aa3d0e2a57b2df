"""How an engine lays its models out, and that it changes nothing but its speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig
from dflash_jax.engine import device
from dflash_jax.kernels import native
from dflash_jax.kernels.product import RowMatrix
from dflash_jax.models.draft import make_shortlist
from dflash_jax.models.target import extend
from tests.pairs import SAMPLING, SIZES, models

pytestmark = pytest.mark.usefixtures("native_code")

PAIR = "recall-dflash2"
MODELS = models(PAIR)
TIED = MODELS.replace(target=MODELS.target.replace(lm_head=None))
PROMPTS = [[60, 1, 2, 33, 4, 5], [60, 9, 2, 8]]


def listed(of):
    return of.replace(shortlist=make_shortlist(of.target, range(0, 64, 2)))


def test_matrices_lie_a_row_per_output_and_all_else_as_before():
    before, after = listed(MODELS), device.arranged(listed(MODELS), None)
    np.testing.assert_array_equal(
        after.target.layers[0].mlp.up_proj.weight.value, before.target.layers[0].mlp.up_proj.weight.T
    )
    np.testing.assert_array_equal(after.target.lm_head.value, before.target.lm_head.T)
    np.testing.assert_array_equal(after.draft.fc.value, before.draft.fc.T)
    np.testing.assert_array_equal(after.shortlist.head.value, before.shortlist.head.T)
    assert after.draft.selector.successor_codebook is before.draft.selector.successor_codebook
    assert after.target.norm is before.target.norm


def test_a_tied_head_lies_so_already_and_is_not_copied():
    after = device.arranged(TIED, None).target
    assert after.lm_head.value is after.embedding is TIED.target.embedding


def test_what_is_arranged_or_needs_not_be_is_left_alone(monkeypatch):
    after = device.arranged(MODELS, None)
    assert device.arranged(after, None) is after
    later = device.arranged(listed(after), None)
    assert isinstance(later.shortlist.head, RowMatrix) and later.draft.fc is after.draft.fc
    assert device.arranged(MODELS, "xla") is MODELS
    monkeypatch.setattr(native, "available", lambda: False)
    assert device.arranged(MODELS, None) is MODELS


@pytest.mark.parametrize("of", [MODELS, TIED], ids=["", "tied"])
def test_a_shortlist_of_arranged_models_is_the_shortlist(of):
    one, other = (make_shortlist(target, [3, 1, 60]) for target in (of.target, device.arranged(of, None).target))
    jax.tree.map(np.testing.assert_array_equal, one, other)


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
@pytest.mark.parametrize(("dtype", "arranged"), [("bfloat16", True), ("float16", False)])
def test_other_dtypes_decode_too(of, dtype, arranged):
    short = jax.tree.map(lambda leaf: leaf.astype(dtype), of)
    assert isinstance(device.arranged(short, None).target.lm_head, RowMatrix) == arranged
    [completion] = Engine(short, EngineConfig(**SIZES), k=3).generate([PROMPTS[0]], SAMPLING)
    assert len(completion.token_ids) == SAMPLING["max_tokens"]
