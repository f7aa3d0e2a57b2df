"""The native product on CPUs: right, and the same bits in any company."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.kernels import native
from dflash_jax.kernels.matmul import matmul
from dflash_jax.kernels.matmul.native import MOST_ROWS, MOST_SHORT, multiply
from dflash_jax.models.matrix import Matrix
from tests.kernels.compact_cases import draw

needs_native = pytest.mark.usefixtures("native_code")


BEYOND = [
    # dtype, rows, whether the processor has bfloat16, whether native code multiplies
    ("float32", MOST_ROWS + 1, False, False),
    ("float16", 1, False, False),
    ("bfloat16", MOST_ROWS + 1, True, True),
    ("bfloat16", MOST_SHORT + 1, True, False),
]


def case(rows, inputs, outputs, dtype, seed=0):
    draw = np.random.default_rng(seed)
    x = jnp.asarray(draw.normal(size=(rows, inputs)), jnp.float32)
    return x, jnp.asarray(draw.normal(size=(outputs, inputs)) / np.sqrt(max(inputs, 1)), dtype)


def exact(x, matrix):
    return np.asarray(x, np.float64) @ np.asarray(matrix.astype(jnp.float32), np.float64).T


@needs_native
@given(
    rows=st.integers(0, MOST_ROWS),
    inputs=st.integers(0, 80),
    outputs=st.integers(0, 300),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_it_is_the_product(rows, inputs, outputs, dtype, seed):
    x, matrix = case(rows, inputs, outputs, dtype, seed)
    np.testing.assert_allclose(multiply(x, matrix), exact(x, matrix), atol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 193), (77, 50)])
def test_a_rows_result_is_the_same_bits_alone_and_in_a_block(inputs, outputs, dtype):
    x, matrix = case(MOST_ROWS, inputs, outputs, dtype)
    alone = jnp.concatenate([multiply(row[None], matrix) for row in x])
    for rows in range(1, MOST_ROWS + 1):
        np.testing.assert_array_equal(multiply(x[:rows], matrix), alone[:rows])


@needs_native
def test_many_at_once_wait_for_nobody():
    """Products that are independent run side by side on the threads that each would like to use."""
    x, matrix = case(3, 256, 1024, "float32")
    matrices = [matrix + index for index in range(24)]
    run = jax.jit(lambda x, matrices: [multiply(x + index, m) for index, m in enumerate(matrices)])
    for _ in range(20):
        results = run(x, matrices)
    for index, result in enumerate(results):
        np.testing.assert_allclose(result, exact(x + index, matrices[index]), rtol=1e-3, atol=1e-3)


@needs_native
def test_a_pool_of_one_thread_is_enough():
    """In a process of its own: how many threads XLA has is settled when it starts, and what blocks blocks for ever."""
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp
from dflash_jax.kernels import native
from dflash_jax.kernels.matmul.native import multiply
assert native.available()
run = jax.jit(lambda x, ms: sum(multiply(x + i, m) for i, m in enumerate(ms)))
print(float(run(jnp.ones((3, 256)), [jnp.ones((1024, 256))] * 24).max()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [str(256.0 * sum(range(1, 25)))], done.stderr


@needs_native
def test_rows_of_other_lengths_are_refused():
    x, matrix = case(2, 8, 4, "float32")
    with pytest.raises(TypeError, match="rows of 7 values cannot be multiplied by a matrix with rows of 8"):
        multiply(x[:, :7], matrix)


@needs_native
@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_matrix_in_native_layout_stands_where_an_array_does(rows, dtype):
    x, matrix = case(rows, 48, 40, dtype)
    kept = Matrix(matrix, "out_in")
    blocks = x.reshape(rows, 1, 48).astype(dtype)
    product = blocks @ kept
    assert product.dtype == (blocks @ matrix.T).dtype and product.shape == (rows, 1, 40)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(product[:, 0].astype("float32"), exact(blocks[:, 0], matrix), atol=tolerance)
    sums = matmul(blocks, matrix, layout="out_in", wide=True)
    assert sums.dtype == jnp.float32
    np.testing.assert_allclose(sums[:, 0], exact(blocks[:, 0], matrix), atol=1e-5)


@needs_native
@pytest.mark.parametrize(("dtype", "rows", "has_bfloat16", "is_native"), BEYOND)
def test_beyond_some_rows_the_product_is_xlas(dtype, rows, has_bfloat16, is_native, monkeypatch):
    monkeypatch.setattr(native, "has_bfloat16", lambda: has_bfloat16)
    x, matrix = case(rows, 48, 40, dtype)
    program = str(jax.make_jaxpr(lambda x: x.astype(dtype) @ Matrix(matrix, "out_in"))(x))
    assert ("dflash_multiply" in program) == is_native


@needs_native
@pytest.mark.parametrize("outputs", [1, 7, 40, 60])
@pytest.mark.parametrize("kind", ["bfloat16", "I8", "Q4_1"])
def test_many_rows_meet_a_matrix_that_is_widened_in_parts(kind, outputs, monkeypatch):
    monkeypatch.setattr(native, "has_bfloat16", lambda: False)
    monkeypatch.setattr("dflash_jax.kernels.matmul.native._TILE", 1000)
    matrix = case(1, 64, outputs, kind)[1] if kind == "bfloat16" else draw(kind, outputs, 2, 3)
    x = case(MOST_SHORT + 1, matrix.shape[1], 1, "float32")[0]
    program = str(jax.make_jaxpr(lambda x: matmul(x, matrix, layout="out_in"))(x))
    assert "dot_general" in program and "dflash_multiply" not in program
    values = np.asarray(matrix.astype("float32"), np.float64)
    scale = 1 + np.abs(np.asarray(x)) @ np.abs(values.T)
    found = matmul(x, matrix, layout="out_in", wide=True)
    np.testing.assert_array_less(np.abs(found - np.asarray(x) @ values.T), 1e-6 * scale)


@needs_native
def test_it_can_be_mapped():
    x, matrix = case(6, 48, 40, "float32")
    np.testing.assert_array_equal(
        jax.vmap(lambda row: row[None] @ Matrix(matrix, "out_in"))(x)[:, 0], x @ Matrix(matrix, "out_in")
    )
