"""Target and draft against tensors of the reference implementations."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import load_target
from dflash_jax.engine import Models
from dflash_jax.engine.state import EngineState, init_state
from dflash_jax.kernels.selector.xla import edge_scores
from dflash_jax.models.draft import context_entries, run_block
from dflash_jax.models.lm_head import draft_head
from dflash_jax.models.target import Extension, extend, lm_head
from tests.pairs import GOLDEN, PAIRS, cases, models, tensors

TOLERANCE = 2e-4
ROW = jnp.zeros(1, jnp.int32)
NAMES = ("unary_logits", "candidates", "edge_scores")
FAMILIES = ("tiny-llama-rope3-tied", "tiny-qwen3-moe")


def one_slot(of: Models) -> EngineState:
    state = init_state(of, rows=1, slots=1, num_pages=12, page_size=16, max_model_len=192)
    # Pages in an order that is not the identity: a kernel that ignores the block table is wrong.
    table = jnp.arange(11, -1, -1, dtype=jnp.int32)[None]
    return state.replace(slots=state.slots.replace(block_table=table))


@partial(jax.jit, static_argnames="layers")
def jitted_extend(of: Models, state: EngineState, tokens, count, layers) -> tuple[EngineState, Extension, jax.Array]:
    context = state.target_context(ROW)
    extension = extend(of.target, of.target_config, context, tokens, count, feature_layers=layers)
    slots = state.slots.replace(position=state.slots.position + count)
    state = state.replace(target_pages=context.write(extension.entries, count), slots=slots)
    return state, extension, lm_head(of.target, extension.hidden)


def run_chunk(of: Models, state: EngineState, tokens: list[int], *, width: int = 128, layers=None):
    """State, features and logits after some tokens, padded to `width` so that few programs are compiled."""
    padded = jnp.array([tokens + [0] * (width - len(tokens))], jnp.int32)
    count = jnp.array([len(tokens)], jnp.int32)
    layers = of.feature_layers if layers is None else layers
    state, extension, logits = jitted_extend(of, state, padded, count, layers)
    return state, extension.features[:, : len(tokens)], np.asarray(logits[0, : len(tokens)])


def logits_in_chunks(of: Models, tokens: list[int], chunk: int) -> np.ndarray:
    state, logits = one_slot(of), []
    for start in range(0, len(tokens), chunk):
        state, _, some = run_chunk(of, state, tokens[start : start + chunk], width=min(chunk, 128))
        logits.append(some)
    return np.concatenate(logits)


@pytest.mark.parametrize("pair", PAIRS)
def test_prompt_logits_and_features_are_the_references(pair):
    of = models(pair)
    for index, case in enumerate(cases(pair)):
        _, features, logits = run_chunk(of, one_slot(of), case["prompt"])
        np.testing.assert_allclose(logits, tensors(pair)[f"{index}.prompt_logits"], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(features[0], tensors(pair)[f"{index}.prompt_features"], atol=TOLERANCE, rtol=0)


@jax.jit
def jitted_block(of: Models, features, count, anchor):
    """The draft's block after `count` tokens with these features, and its logits."""
    state = one_slot(of)
    entries = context_entries(of.draft, of.draft_config, features, jnp.arange(features.shape[1])[None])
    pages = state.draft_context(ROW).write(entries, count)
    context = state.replace(draft_pages=pages, slots=state.slots.replace(draft_len=count)).draft_context(ROW)
    hidden = run_block(of.draft, of.draft_config, of.target.embedding, context, anchor, 7)
    return hidden, draft_head(of.draft_config, of.target).logits(hidden[:, 1:])


def draft_block(of: Models, committed: list[int]):
    """Hidden states and logits of the block whose anchor is the last committed token."""
    context = committed[:-1]
    _, features, _ = run_chunk(of, one_slot(of), context)
    features = jnp.pad(features, ((0, 0), (0, 128 - len(context)), (0, 0)))
    anchor = jnp.array([committed[-1]], jnp.int32)
    hidden, logits = jitted_block(of, features, jnp.array([len(context)], jnp.int32), anchor)
    return hidden, logits, anchor


@pytest.mark.parametrize("pair", PAIRS)
def test_draft_hidden_states_are_the_references(pair):
    of = models(pair)
    for index, case in enumerate(cases(pair)):
        produced = [1, *case["produced_per_round"]]
        for done in range(3):
            committed = case["prompt"] + case["greedy_tokens"][: sum(produced[: done + 1])]
            hidden, _, _ = draft_block(of, committed)
            golden = tensors(pair)[f"{index}.round{done}.draft_hidden"]
            np.testing.assert_allclose(hidden[0], golden, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "dflash2" in pair])
def test_candidates_and_edge_scores_are_the_references(pair):
    of = models(pair)
    top_k, weights = of.draft_config.selector.top_k, of.draft.selector

    @jax.jit
    def score(hidden, anchor):
        unary, tokens = draft_head(of.draft_config, of.target).best(hidden, top_k)
        gate = hidden @ weights.hidden_projection
        codebooks = weights.predecessor_codebook, weights.successor_codebook
        return tokens, edge_scores(tokens, unary, gate, anchor, *codebooks)

    for index, case in enumerate(cases(pair)):
        golden = {
            name: tensors(pair)[f"{index}.round0.{name}"] for name in ("unary_logits", "candidates", "edge_scores")
        }
        hidden, logits, anchor = draft_block(of, case["prompt"] + case["greedy_tokens"][:1])
        tokens, edges = score(hidden[:, 1:], anchor)
        np.testing.assert_array_equal(tokens[0], golden["candidates"])
        np.testing.assert_allclose(logits[0], golden["unary_logits"], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(edges[0], golden["edge_scores"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [128, 5, 1], ids=["one chunk", "chunks of 5", "token by token"])
@pytest.mark.parametrize("family", [*FAMILIES, "recall-target"])
def test_targets_of_all_families_agree_with_transformers(family, chunk):
    if family == "recall-target":
        of, sequences = models(None), [(tensors(PAIRS[0])["4.prompt_logits"], cases(PAIRS[0])[4]["prompt"])]
    else:
        target = load_target(GOLDEN / family)
        of, golden = Models(target.params, target.config), tensors(family)
        names = sorted(name[: -len(".ids")] for name in golden if name.endswith(".ids"))
        sequences = [(golden[f"{i}.logits"], golden[f"{i}.ids"].tolist()) for i in names]
    for golden_logits, tokens in sequences:
        np.testing.assert_allclose(logits_in_chunks(of, tokens, chunk), golden_logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_each_layer_agree_with_transformers(family):
    target, golden = load_target(GOLDEN / family), tensors(family)
    of = Models(target.params, target.config)
    layers = tuple(range(target.config.num_layers - 1))
    names = sorted(name[: -len(".ids")] for name in golden if name.endswith(".ids"))
    for i in names:
        _, features, _ = run_chunk(of, one_slot(of), golden[f"{i}.ids"].tolist(), layers=layers)
        wanted = np.concatenate(list(golden[f"{i}.hidden_states"][1:]), axis=-1)
        np.testing.assert_allclose(features[0], wanted, atol=TOLERANCE, rtol=0)
