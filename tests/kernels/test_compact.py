"""Matrices as files have them: widened to the very values of the formats, and multiplied as the widened ones are."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.kernels.compact import FORMATS, Compact, all_finite, compact
from dflash_jax.kernels.lm_head import best_tokens
from dflash_jax.kernels.matmul import matmul
from dflash_jax.kernels.matmul.native import multiply, multiply_codes, widen
from dflash_jax.models.matrix import Matrix, map_matrices
from tests.kernels.compact_cases import draw

needs_native = pytest.mark.usefixtures("native_code")
of_gguf = [name for name, kind in FORMATS.items() if kind.halves]


def wide(matrix):
    return np.asarray(matrix.astype("float32"))


def case(rows, matrix, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, matrix.shape[1])), jnp.float32)


@pytest.mark.parametrize("format", of_gguf)
def test_it_is_widened_to_what_ggml_reads(format):
    codes = np.random.default_rng(1).integers(0, 256, (40, 3 * FORMATS[format].size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[format])
    found = jax.jit(lambda matrix: matrix.astype("float32"))(compact(codes, format))
    np.testing.assert_array_equal(found, expected)
    assert not np.isfinite(expected).all()  # scales that are no numbers are among them


@needs_native
@pytest.mark.parametrize("format", FORMATS)
@given(rows=st.integers(0, 40), outputs=st.integers(1, 90), units=st.integers(0, 6), seed=st.integers(0, 99))
def test_its_product_is_that_of_the_widened_matrix_to_the_bit(format, rows, outputs, units, seed):
    matrix = draw(format, outputs, units, seed)
    x, values = case(rows, matrix, seed), wide(matrix)
    found = np.asarray(multiply_codes(x, matrix))
    np.testing.assert_array_equal(found, multiply(x, jnp.asarray(values)))
    exact = np.asarray(x, np.float64) @ values.T.astype(np.float64)
    scale = 1 + np.abs(np.asarray(x)).astype(np.float64) @ np.abs(values.T)
    np.testing.assert_array_less(np.abs(found - exact), 1e-6 * scale)


@needs_native
@pytest.mark.parametrize("format", FORMATS)
def test_a_rows_result_is_the_same_bits_alone_and_in_a_block(format):
    matrix = draw(format, 53, 5, 3)
    x = case(33, matrix)
    alone = jnp.concatenate([multiply_codes(row[None], matrix) for row in x])
    for rows in (*range(1, 18), 33):
        np.testing.assert_array_equal(multiply_codes(x[:rows], matrix), alone[:rows])


@needs_native
@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ("F16", "BF16")])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_reach_the_product(format, scale):
    matrix = draw(format, 5, 2, 0, halves=scale)
    for rows in (1, 9):
        x = jnp.abs(case(rows, matrix)) + 1
        found, expected = np.asarray(multiply_codes(x, matrix)), np.asarray(x @ matrix.astype("float32").T)
        assert not np.isfinite(found).any()
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@needs_native
@pytest.mark.parametrize("format", FORMATS)
def test_native_code_widens_to_the_same_bits(format):
    for outputs, units in ((1, 1), (53, 5)):
        matrix = draw(format, outputs, units, 4)
        np.testing.assert_array_equal(widen(matrix), wide(matrix))


@needs_native
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_makes_none(code):
    codes = np.full((3, 32), code, np.uint8).view(FORMATS["F8_E4M3"].dtype_of_codes)
    matrix = compact(codes, "F8_E4M3", np.ones((3, 1), np.float32), 32)
    assert not all_finite(codes, "F8_E4M3", np.ones((3, 1), np.float32))
    assert np.isnan(multiply_codes(jnp.ones((2, 32)), matrix)).all()


@needs_native
def test_every_code_of_eight_bits_is_its_number():
    codes = np.arange(256, dtype=np.uint8)[:, None] * np.ones((1, 16), np.uint8)
    for format, sign in (("I8", np.int8), ("F8_E4M3", FORMATS["F8_E4M3"].dtype_of_codes)):
        matrix = compact(codes.view(sign), format, np.ones((256, 1), np.float32), 16)
        found = multiply_codes(jnp.asarray(np.eye(1, 16), jnp.float32), matrix)[0]
        np.testing.assert_array_equal(found, codes[:, 0].view(sign).astype(np.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("implementation", ["native", "xla", "reference", None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_stands_where_an_array_does(format, implementation, dtype):
    matrix = draw(format, 70, 3, 7).replace(dtype_name=dtype)
    assert (matrix.shape, matrix.dtype, matrix.ndim, matrix.size) == (wide(matrix).shape, dtype, 2, wide(matrix).size)
    x = case(6, matrix).reshape(2, 3, -1).astype(dtype)
    exact = np.asarray(x, np.float64) @ wide(matrix).T.astype(np.float64)
    scale = 1 + np.abs(np.asarray(x, np.float64)) @ np.abs(wide(matrix).T)
    found = matmul(x, matrix, layout="out_in", implementation=implementation)
    assert found.dtype == dtype and found.shape == (2, 3, 70)
    assert (np.abs(found.astype("float32") - exact) < scale * (1e-6 if dtype == "float32" else 1e-2)).all()
    sums = matmul(x, matrix, layout="out_in", wide=True, implementation=implementation)
    assert sums.dtype == jnp.float32 and (np.abs(sums - exact) < 1e-6 * scale).all()
    rows = matrix[jnp.asarray([[3, 0], [69, 3]])]
    np.testing.assert_array_equal(rows, wide(matrix).astype(dtype)[[[3, 0], [69, 3]]])
    values, tokens = best_tokens(x, matrix, layout="out_in", top_k=2, implementation=implementation)
    np.testing.assert_array_equal(tokens[..., 0], np.argmax(sums, -1))
    np.testing.assert_allclose(values[..., 0], np.max(sums, -1))


@pytest.mark.parametrize("format", FORMATS)
def test_a_matrix_of_it_gives_some_outputs_as_they_are_kept_and_others_widened(format):
    kept = Matrix(draw(format, 20, 3, 1), "out_in")
    some = kept.with_outputs(jnp.asarray([7, 2]))
    assert isinstance(some.value, Compact)
    np.testing.assert_array_equal(wide(some.value), wide(kept.value)[[7, 2]])
    np.testing.assert_array_equal(kept.out_in, wide(kept.value))
    np.testing.assert_array_equal(kept.in_out, wide(kept.value).T)
    assert kept.shape == wide(kept.value).T.shape
    assert map_matrices(lambda matrix: matrix.laid_out("out_in"), [kept])[0] is kept


@pytest.mark.parametrize("format", of_gguf)
def test_damage_is_seen_in_the_scales_alone(format):
    matrix = draw(format, 4, 2, 5)
    codes = np.array(matrix.codes)
    assert all_finite(codes, format)
    for at in FORMATS[format].halves:
        damaged = codes.copy()
        damaged[3, FORMATS[format].size + at :][:2] = np.array([np.inf], np.float16).view(np.uint8)
        assert not all_finite(damaged, format)
        assert not np.isfinite(wide(compact(damaged, format))).all()


def test_arrays_that_a_format_has_not_are_refused():
    with pytest.raises(ValueError, match=r"codes of Q4_0 are uint8 \[outputs, units of 18\], not uint8 \(3, 20\)"):
        compact(np.zeros((3, 20), np.uint8), "Q4_0")
    with pytest.raises(ValueError, match=r"scales of I8 are \[outputs, groups of 16 inputs\], not None"):
        compact(np.zeros((3, 32), np.int8), "I8", None, 16)


@needs_native
def test_rows_of_other_lengths_are_refused():
    matrix = draw("Q4_1", 3, 2, 0)
    with pytest.raises(TypeError, match="rows of 63 values cannot be multiplied by a matrix with rows of 64"):
        multiply_codes(jnp.ones((1, 63)), matrix)


@needs_native
@pytest.mark.parametrize("change", [{"format": "Q4_0"}, {"format": "I8"}, {"scales": jnp.ones((3, 2))}])
def test_native_code_refuses_what_is_not_of_the_format(change):
    matrix = draw("Q4_1", 3, 2, 0).replace(**change)
    call = jax.ffi.ffi_call("dflash_multiply_codes", jax.ShapeDtypeStruct((1, 3), jnp.float32))
    with pytest.raises(Exception, match=r"codes as its format needs|codes are not of the format|scales are"):
        call(
            jnp.ones((1, 64)), matrix.codes, matrix.scales, format=matrix.format, group=np.int64(0)
        ).block_until_ready()
