"""The native product on CPUs: right, the same bits in any company, and never in the way where it cannot be had."""

from __future__ import annotations

import logging
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.kernels import choice
from dflash_jax.kernels.product import MOST_ROWS, RowMatrix, native

needs_native = pytest.mark.usefixtures("native_code")


def case(rows, inputs, outputs, dtype, seed=0):
    draw = np.random.default_rng(seed)
    x = jnp.asarray(draw.normal(size=(rows, inputs)), jnp.float32)
    return x, jnp.asarray(draw.normal(size=(outputs, inputs)) / np.sqrt(inputs), dtype)


def exact(x, matrix):
    return np.asarray(x, np.float64) @ np.asarray(matrix.astype(jnp.float32), np.float64).T


@needs_native
@given(
    rows=st.integers(1, MOST_ROWS),
    inputs=st.integers(1, 80),
    outputs=st.integers(1, 300),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_it_is_the_product(rows, inputs, outputs, dtype, seed):
    x, matrix = case(rows, inputs, outputs, dtype, seed)
    np.testing.assert_allclose(native.multiply(x, matrix), exact(x, matrix), atol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 193), (77, 50)])
def test_a_rows_result_is_the_same_bits_alone_and_in_a_block(inputs, outputs, dtype):
    x, matrix = case(MOST_ROWS, inputs, outputs, dtype)
    alone = jnp.concatenate([native.multiply(row[None], matrix) for row in x])
    for rows in range(1, MOST_ROWS + 1):
        np.testing.assert_array_equal(native.multiply(x[:rows], matrix), alone[:rows])


@needs_native
def test_many_at_once_wait_for_nobody():
    """Products that are independent run side by side on the threads that each would like to use."""
    x, matrix = case(3, 256, 1024, "float32")
    matrices = [matrix + index for index in range(24)]
    run = jax.jit(lambda x, matrices: [native.multiply(x + index, m) for index, m in enumerate(matrices)])
    for _ in range(20):
        results = run(x, matrices)
    for index, result in enumerate(results):
        np.testing.assert_allclose(result, exact(x + index, matrices[index]), rtol=1e-3, atol=1e-3)


@needs_native
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_matrix_stands_where_an_array_does(rows, dtype):
    x, matrix = case(rows, 48, 40, dtype)
    arranged = RowMatrix(matrix)
    blocks = x.reshape(rows, 1, 48).astype(dtype)
    product = blocks @ arranged
    assert product.dtype == (blocks @ matrix.T).dtype and product.shape == (rows, 1, 40)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(product[:, 0].astype("float32"), exact(blocks[:, 0], matrix), atol=tolerance)
    assert arranged.product(blocks).dtype == jnp.float32
    np.testing.assert_allclose(arranged.product(blocks)[:, 0], exact(blocks[:, 0], matrix), atol=1e-5)
    np.testing.assert_array_equal(arranged[jnp.array([3, 1])], matrix[jnp.array([3, 1])])


@pytest.fixture
def unbuilt(tmp_path, monkeypatch):
    """Nothing is known of native code, and none is kept, in the test; afterwards all is as before."""
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    native.available.cache_clear()
    choice.log_once.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    native.available.cache_clear()


@needs_native
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no-such-compiler does not run"),
        ("false", "false does not compile native.cc"),
        ("c++ -Dnamespace=nonsense", "does not compile native.cc: .*error"),
    ],
)
def test_without_a_compiler_the_log_says_why_once(unbuilt, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert not native.available()
        assert not native.available()
    [record] = caplog.records
    assert "products of a few rows take XLA's code" in record.message
    assert re.search(reason, record.message)


def test_no_compiler_at_all_is_said_so(unbuilt, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(unbuilt))
    with caplog.at_level(logging.WARNING):
        assert not native.available()
    assert "there is no C++ compiler" in caplog.text


@pytest.fixture
def quick_compiler(unbuilt, monkeypatch):
    """Writes what is no code to where it is told to."""
    script = unbuilt / "compiler"
    script.write_text('while [ "$1" != -o ]; do shift; done; echo "not code" > "$2"')
    monkeypatch.setenv("CXX", f"sh {script}")


def test_it_is_compiled_once_and_kept(unbuilt, quick_compiler, monkeypatch):
    kept = native.library()
    assert kept.parent == unbuilt / "cache" / "native"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.library() == kept
    assert list(kept.parent.iterdir()) == [kept]


def test_a_cache_that_cannot_be_written_is_done_without(unbuilt, quick_compiler):
    (unbuilt / "cache").write_text("a file where the directory should be")
    assert native.library().read_text() == "not code\n"


def test_another_processor_or_compiler_has_code_of_its_own(unbuilt, quick_compiler, monkeypatch):
    first = native.library()
    monkeypatch.setattr(native, "_processor", lambda: "another")
    second = native.library()
    monkeypatch.setenv("CXX", "sh " + str(unbuilt / "compiler") + " -g")
    assert len({first, second, native.library()}) == 3


def test_what_cannot_be_loaded_is_done_without(unbuilt, quick_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        assert not native.available()
    assert native.library().name in caplog.text
