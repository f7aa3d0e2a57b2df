"""Hybrid targets against tensors of transformers, however their tokens are cut and their states handed over."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import load_target
from dflash_jax.engine import Models
from dflash_jax.engine.device import prepare
from dflash_jax.engine.state import init_pages
from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.models.config import TargetConfig
from dflash_jax.models.recurrent import Recurrent, commit, init_recurrent
from dflash_jax.models.target import Extension, extend, lm_head
from dflash_jax.models.weights import TargetParams
from tests.pairs import GOLDEN, tensors

TOLERANCE = 2e-4
PAGE, PAGES, SLOTS, SLOT = 16, 20, 3, 1
TARGETS = ("tiny-qwen3_5", "tiny-qwen3_5-moe", "tiny-qwen3-next")
BLOCK = 17
DTYPE = jnp.dtype("float32")

Cached = tuple[KeyValues, Recurrent, jax.Array]


@cache
def target(name: str) -> tuple[TargetParams, TargetConfig]:
    loaded = load_target(GOLDEN / name)
    return prepare(Models(loaded.params, loaded.config), None).target, loaded.config


def sequences(name: str) -> list[str]:
    return sorted(key[: -len(".ids")] for key in tensors(name) if key.endswith(".ids"))


def nothing_cached(config: TargetConfig) -> Cached:
    recurrent = init_recurrent(config, SLOTS, DTYPE)
    # What other slots hold must not matter.
    noise = jax.tree.map(lambda x: x.at[:, :SLOT].set(7.0).at[:, SLOT + 1 :].set(-7.0), recurrent)
    return init_pages(config, PAGES, PAGE, DTYPE), noise, jnp.zeros((), jnp.int32)


@partial(jax.jit, static_argnames=("config", "prefill", "layers"))
def step(params, config, cached: Cached, tokens, count, accepted, prefill, layers=()):
    """Extends a slot by the first `count` of some tokens, in the second of three rows, and commits the accepted."""
    pages, recurrent, length = cached
    rows = jnp.array([-1, SLOT, -1], jnp.int32)
    table = jnp.full((SLOTS, PAGES), -1, jnp.int32).at[SLOT].set(jnp.arange(PAGES)[::-1])
    lengths = jnp.zeros(SLOTS, jnp.int32).at[SLOT].set(length)
    context = Context(pages, table, rows, lengths)
    counts, taken = (jnp.array([0, 1, 0], jnp.int32) * number for number in (count, accepted))
    padded = jnp.broadcast_to(tokens, (3, *tokens.shape))
    extension: Extension = extend(
        params, config, context, padded, counts, recurrent=recurrent, prefill=prefill, feature_layers=layers
    )
    after = (
        context.write(extension.entries, taken),
        commit(recurrent, extension.changes, rows, taken),
        length + accepted,
    )
    return after, lm_head(params, extension.hidden[1]), extension.features[1]


def run(name: str, cached: Cached, ids: list[int], width: int, prefill: bool, layers=()):
    params, config = target(name)
    padded = jnp.array(ids + [0] * (width - len(ids)), jnp.int32)
    cached, logits, features = step(params, config, cached, padded, len(ids), len(ids), prefill, layers)
    return cached, np.asarray(logits)[: len(ids)], np.asarray(features)[: len(ids)]


def logits_in_pieces(name: str, ids: list[int], size: int, prefill: bool) -> np.ndarray:
    cached, found = nothing_cached(target(name)[1]), []
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        cached, logits, _ = run(name, cached, piece, max(size, len(piece)), prefill)
        found.append(logits)
    return np.concatenate(found)


@pytest.mark.parametrize("size", [128, 5, 1], ids=["one chunk", "chunks of 5", "token by token"])
@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "block"])
@pytest.mark.parametrize("name", TARGETS)
def test_logits_of_hybrids_are_those_of_transformers(name, prefill, size):
    if not prefill:
        size = min(size, BLOCK)
    for i in sequences(name):
        golden = tensors(name)
        found = logits_in_pieces(name, golden[f"{i}.ids"].tolist(), size, prefill)
        np.testing.assert_allclose(found, golden[f"{i}.logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", TARGETS)
def test_hidden_states_of_each_layer_of_hybrids_are_those_of_transformers(name):
    config, golden = target(name)[1], tensors(name)
    layers = tuple(range(config.num_layers - 1))
    for i in sequences(name):
        _, _, features = run(name, nothing_cached(config), golden[f"{i}.ids"].tolist(), 128, True, layers)
        wanted = np.concatenate(list(golden[f"{i}.hidden_states"][1:]), axis=-1)
        np.testing.assert_allclose(features, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", TARGETS)
def test_state_handed_over_from_a_prompt_to_blocks_at_every_point(name):
    golden = tensors(name)
    i = sequences(name)[1]
    ids, wanted = golden[f"{i}.ids"].tolist(), golden[f"{i}.logits"]
    for split in range(1, len(ids)):
        cached, first, _ = run(name, nothing_cached(target(name)[1]), ids[:split], 128, True)
        found = [first]
        for start in range(split, len(ids), BLOCK):
            cached, logits, _ = run(name, cached, ids[start : start + BLOCK], BLOCK, False)
            found.append(logits)
        np.testing.assert_allclose(np.concatenate(found), wanted, atol=TOLERANCE, rtol=0, err_msg=str(split))


@pytest.mark.parametrize("name", TARGETS[1:])
def test_greedy_tokens_of_hybrids_are_those_of_transformers_over_200_tokens(name):
    golden = tensors(name)
    wanted = golden["1.greedy"].tolist()
    cached, logits, _ = run(name, nothing_cached(target(name)[1]), golden["1.ids"].tolist(), 128, True)
    found = [int(logits[-1].argmax())]
    for _ in wanted[1:]:
        cached, logits, _ = run(name, cached, found[-1:], 1, False)
        found.append(int(logits[-1].argmax()))
    assert found == wanted


@pytest.mark.parametrize("name", TARGETS)
def test_rejected_tokens_of_a_block_leave_the_states_as_one_by_one(name):
    golden = tensors(name)
    ids = golden[f"{sequences(name)[-1]}.ids"].tolist()
    params, config = target(name)
    # Of more than 16 tokens in all, XLA computes the products, whose bits depend on how many they are.
    prompt, block = ids[:20], ids[20:25]
    before, _, _ = run(name, nothing_cached(config), prompt, 128, True)
    alone = before
    for accepted in range(len(block) + 1):
        together, _, _ = step(params, config, before, jnp.array(block, jnp.int32), len(block), accepted, False)
        for one, other in zip(jax.tree.leaves(together[1:]), jax.tree.leaves(alone[1:]), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{accepted} accepted")
        if accepted < len(block):
            alone, _, _ = run(name, alone, [block[accepted]], 1, False)


def test_a_hybrid_without_states_is_refused():
    params, config = target("tiny-qwen3_5")
    context = Context(init_pages(config, 1, PAGE, DTYPE), *(jnp.zeros(s, jnp.int32) for s in ((1, 1), 1, 1)))
    with pytest.raises(ValueError, match="needs their states"):
        extend(params, config, context, jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4))
