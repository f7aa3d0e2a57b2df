"""The native product on CPUs: right, the same bits in any company, and never in the way where it cannot be had."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys

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
def test_a_pool_of_one_thread_is_enough():
    """In a process of its own: how many threads XLA has is settled when it starts, and what blocks blocks for ever."""
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp
from dflash_jax.kernels.product import native
assert native.available()
run = jax.jit(lambda x, ms: sum(native.multiply(x + i, m) for i, m in enumerate(ms)))
print(float(run(jnp.ones((3, 256)), [jnp.ones((1024, 256))] * 24).max()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [str(256.0 * sum(range(1, 25)))], done.stderr


@needs_native
def test_rows_of_other_lengths_are_refused():
    x, matrix = case(2, 8, 4, "float32")
    with pytest.raises(TypeError, match="rows of 7 values cannot be multiplied by a matrix with rows of 8"):
        native.multiply(x[:, :7], matrix)


@needs_native
@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_matrix_stands_where_an_array_does(rows, dtype):
    x, matrix = case(rows, 48, 40, dtype)
    arranged = RowMatrix(matrix)
    blocks = x.reshape(rows, 1, 48).astype(dtype)
    product = blocks @ arranged
    assert product.dtype == (blocks @ matrix.T).dtype and product.shape == (rows, 1, 40)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(product[:, 0].astype("float32"), exact(blocks[:, 0], matrix), atol=tolerance)
    assert arranged.product(blocks).dtype == jnp.float32
    np.testing.assert_allclose(arranged.product(blocks)[:, 0], exact(blocks[:, 0], matrix), atol=1e-5)


@needs_native
def test_it_can_be_mapped():
    x, matrix = case(6, 48, 40, "float32")
    np.testing.assert_array_equal(jax.vmap(lambda row: row[None] @ RowMatrix(matrix))(x)[:, 0], x @ RowMatrix(matrix))


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
        ("no-such-compiler", "no-such-compiler does not run: .*No such file"),
        ("false", "false fails: exit 1"),
        (None, "fails: .*error"),
        ('g++ "-O2', "fails: "),
        ("true", "what true makes of native.cc cannot be loaded"),
    ],
)
def test_without_a_compiler_the_log_says_why_once(unbuilt, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CXX", compiler or " ".join([*native.find_compiler(), "-Dnamespace=nonsense"]))
    with caplog.at_level(logging.WARNING):
        assert not native.available()
        assert not native.available()
    [record] = caplog.records
    assert "products of a few rows take XLA's code" in record.message
    assert re.search(reason, record.message)


@needs_native
def test_a_compiler_that_hangs_is_given_up(unbuilt, monkeypatch, caplog):
    (unbuilt / "compiler").write_text("exec sleep 60")
    monkeypatch.setenv("CXX", f"sh {unbuilt / 'compiler'}")
    monkeypatch.setattr(native, "_PATIENCE", 0.1)
    with caplog.at_level(logging.WARNING):
        assert not native.available()
    assert "sh does not run: " in caplog.text and "timed out" in caplog.text


@needs_native
def test_no_compiler_at_all_is_said_so(unbuilt, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(unbuilt))
    with caplog.at_level(logging.WARNING):
        assert not native.available()
    assert "there is no C++ compiler" in caplog.text


@pytest.fixture
def built(unbuilt, monkeypatch, native_library):
    """Makes the code by copying it, and counts how often."""
    times = unbuilt / "times"
    script = unbuilt / "compiler"
    script.write_text(f'while [ "$1" != -o ]; do shift; done; cp {native_library} "$2"; echo once >> {times}')
    monkeypatch.setenv("CXX", f"sh {script}")
    return lambda: len(times.read_text().split())


@pytest.fixture(scope="module")
def native_library(native_code, tmp_path_factory):
    """The compiled code, as the cache has it."""
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_JAX_CACHE", str(home))
        native.load()
    [kept] = (home / "native").iterdir()
    return kept


def test_it_is_compiled_once_and_kept_where_only_its_owner_writes(unbuilt, built):
    assert native.load() and native.load()
    assert built() == 1
    assert stat.S_IMODE((unbuilt / "cache" / "native").stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written_is_done_without(unbuilt, built):
    (unbuilt / "cache").write_text("a file where the directory should be")
    assert native.load()


def test_nobody_needs_a_home(unbuilt, built, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DFLASH_JAX_CACHE")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert native.load()


def test_what_is_kept_and_damaged_is_made_anew(unbuilt, built):
    native.load()
    [kept] = (unbuilt / "cache" / "native").iterdir()
    kept.unlink()
    kept.write_bytes(b"not code")
    assert native.load()
    assert built() == 2 and kept.stat().st_size > 100


def test_another_machine_or_compiler_has_code_of_its_own(unbuilt, built, monkeypatch):
    native.load()
    monkeypatch.setattr(native, "_machine", lambda: "another")
    native.load()
    monkeypatch.setenv("CXX", os.environ["CXX"] + " -g")
    native.load()
    assert built() == len(list((unbuilt / "cache" / "native").iterdir())) == 3
