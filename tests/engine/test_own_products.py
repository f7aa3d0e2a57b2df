"""Which products a round uses, and that they change nothing but its speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig
from dflash_jax.engine import device
from tests.pairs import SAMPLING, SIZES, models

PAIR = "recall-dflash2"
TIED = models(PAIR).replace(target=models(PAIR).target.replace(lm_head=None))


def in_dtype(of, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), of)


@pytest.fixture
def nothing_known():
    """What was found out about the compiler is found out again, in the test and after it."""
    device._knows_own_products.cache_clear()
    yield
    device._knows_own_products.cache_clear()


@pytest.mark.parametrize(("rows", "own"), [(1, False), (2, True), (6, True), (7, False), (64, False)])
def test_only_a_few_rows_in_float32_take_xlas_own(rows, own):
    assert device.own_products(models(PAIR), rows) == own
    assert not device.own_products(in_dtype(models(PAIR), jnp.bfloat16), rows)


def test_a_compiler_without_the_option_is_left_alone(monkeypatch, nothing_known):
    monkeypatch.setattr(device, "_OWN_PRODUCTS", {"xla_cpu_an_option_of_no_compiler": ""})
    assert not device.own_products(models(PAIR), 4)


def test_a_tied_head_is_turned_and_any_other_stays():
    turned = device.turned_head(TIED)
    np.testing.assert_array_equal(turned.target.lm_head, TIED.target.embedding.T)
    assert device.turned_head(turned) is turned


def test_products_change_neither_tokens_nor_drafts(monkeypatch):
    def completed():
        return Engine(TIED, EngineConfig(**SIZES), k=3).generate([[60, 1, 2, 33, 4, 5]], SAMPLING)[0]

    own = completed()
    monkeypatch.setattr(device, "own_products", lambda *_: False)
    other = completed()
    assert own.token_ids == other.token_ids
    assert own.drafted_blocks == other.drafted_blocks
