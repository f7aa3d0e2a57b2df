"""Tokens into pages: by XLA, and by native code where XLA would copy the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.kernels import native
from dflash_jax.kernels.pages import write_tokens

DTYPES = ["float32", "bfloat16", "float16"]
pytestmark = pytest.mark.usefixtures("native_code")


def case(seed, layers, pages, page_size, rows, tokens, dtype):
    """A pool, values, and a place of its own for each; some tokens have a page that the pool has not."""
    draw = np.random.default_rng(seed)
    pool = jnp.asarray(draw.standard_normal((layers, pages, page_size, 2, 3)), dtype)
    values = jnp.asarray(draw.standard_normal((layers, rows, tokens, 2, 3)), jnp.float32)
    place = draw.permutation((pages + 2) * page_size)[: rows * tokens].reshape(rows, tokens)
    return pool, values, jnp.asarray(place // page_size), jnp.asarray(place % page_size)


def expected(pool, values, page, offset):
    out = np.array(pool.astype(jnp.float32))
    for row, token in np.ndindex(page.shape):
        if page[row, token] < pool.shape[1]:
            rounded = values[:, row, token].astype(pool.dtype).astype(jnp.float32)
            out[:, page[row, token], offset[row, token]] = rounded
    return out


@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 3),
    pages=st.integers(1, 4),
    page_size=st.integers(1, 9),
    rows=st.integers(0, 2),
    tokens=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_tokens_are_where_they_belong_and_all_else_as_before(seed, layers, pages, page_size, rows, tokens, dtype):
    if rows * tokens > (pages + 2) * page_size:
        tokens = 1
    arguments = case(seed, layers, pages, page_size, rows, tokens, dtype)
    out = write_tokens(*arguments)
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(out.astype(jnp.float32), expected(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_is_written_in_place_only_if_it_is_given_away(dtype):
    arguments = case(0, 2, 4, 8, 2, 3, dtype)
    wanted, before = expected(*arguments), np.array(arguments[0].astype(jnp.float32))
    np.testing.assert_array_equal(jax.jit(write_tokens)(*arguments).astype(jnp.float32), wanted)
    np.testing.assert_array_equal(arguments[0].astype(jnp.float32), before)
    place = arguments[0].unsafe_buffer_pointer()
    out = jax.jit(write_tokens, donate_argnums=0)(*arguments)
    assert out.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(out.astype(jnp.float32), wanted)


@pytest.mark.parametrize(("dtype", "is_native"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_native_code_writes_what_xla_would_copy(dtype, is_native, monkeypatch):
    arguments = case(0, 2, 4, 8, 2, 3, dtype)

    def program():
        return str(jax.make_jaxpr(lambda *arguments: write_tokens(*arguments))(*arguments))

    assert ("dflash_write" in program()) == is_native
    monkeypatch.setattr(native, "available", lambda: False)
    assert "dflash_write" not in program()
    np.testing.assert_array_equal(write_tokens(*arguments).astype(jnp.float32), expected(*arguments))
