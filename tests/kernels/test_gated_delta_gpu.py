"""The gated delta rule's Mosaic GPU kernels: in the simulator against the reference, and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels import dispatch
from dflash_jax.kernels.gated_delta import (
    Ingredients,
    fold_block,
    gated_delta_block,
    gated_delta_prefill,
    mosaic_gpu,
    mosaic_gpu_chunks,
)
from tests.kernels.gated_delta_cases import (
    LAYER,
    Shape,
    bits,
    check_outputs,
    check_tables,
    in_float64,
    make_case,
    run_block,
    run_fold,
    run_prefill,
    run_write,
)

SMALL = Shape(rows=3, tokens=5, key_heads=1, group=2, key_dim=8, value_dim=128)
CHUNKS = Shape(rows=2, tokens=150, key_heads=1, group=2, key_dim=64, value_dim=64)


@pytest.mark.parametrize(
    ("idx_mapping", "q_len"),
    [
        pytest.param([2, 0, 3], [5, 5, 5], id="whole blocks"),
        pytest.param([3, 1, 0], [0, 2, 4], id="ragged"),
        pytest.param([1, -1, 2], [5, 5, 1], id="an empty row"),
    ],
)
def test_blocks_and_folds_agree_with_the_reference(idx_mapping, q_len):
    case = make_case(SMALL, idx_mapping=idx_mapping, q_len=q_len)
    out, block = run_block("mosaic_gpu", case)
    check_outputs(case, out)
    check_tables(case, *run_fold("mosaic_gpu", case, block, case.q_len))


@pytest.mark.parametrize(
    "shape",
    [
        Shape("bfloat16", rows=2, tokens=2, key_heads=2, group=1, key_dim=20, value_dim=256, width=2),
        Shape(rows=1, tokens=1, key_heads=1, group=3, key_dim=3, value_dim=128),
    ],
    ids=lambda shape: f"{shape.dtype} {shape.key_dim}x{shape.value_dim}",
)
def test_other_shapes_agree_with_the_reference(shape):
    case = make_case(shape, idx_mapping=[3, 1][: shape.rows], q_len=[shape.tokens] * shape.rows)
    out, block = run_block("mosaic_gpu", case)
    check_outputs(case, out)
    check_tables(case, *run_fold("mosaic_gpu", case, block, case.q_len))


def test_rejected_tokens_are_exactly_the_identity():
    case = make_case(SMALL, idx_mapping=[2, 0, 3], q_len=[5, 5, 5])
    _, block = run_block("xla", case)
    accepted = np.array([2, 0, 5])
    live = np.arange(5) < accepted[:, None]
    poisoned = jax.tree.map(lambda x: jnp.where(live.reshape(3, 5, *(1,) * (x.ndim - 2)), x, jnp.nan), block)
    tables = run_fold("mosaic_gpu", case, block, accepted)
    for table, other in zip(tables, run_fold("mosaic_gpu", case, poisoned, accepted), strict=True):
        np.testing.assert_array_equal(bits(table[LAYER]), bits(other[LAYER]))
    for table, name in zip(tables, ("states", "conv_inputs"), strict=True):
        np.testing.assert_array_equal(bits(table[LAYER, 0]), bits(case.arrays[name][LAYER, 0]))


# Operands have 8 bits of bfloat16 projections and 16 of float32 ones.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(("idx_mapping", "q_len"), [([2, 0], [150, 65]), ([-1, 1], [150, 64]), ([1, 3], [3, 0])])
def test_chunks_agree_with_the_reference(dtype, tolerance, idx_mapping, q_len):
    case = make_case(dataclasses.replace(CHUNKS, dtype=dtype), idx_mapping=idx_mapping, q_len=q_len)
    out, ends = run_prefill("mosaic_gpu", case)
    expected, expected_ends = in_float64(case)
    assert not np.asarray(out)[~case.live].any()
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)
    live = case.idx_mapping >= 0
    scale = np.abs(expected_ends.state[live]).max()
    np.testing.assert_allclose(ends.state[live] / scale, expected_ends.state[live] / scale, atol=tolerance)
    unwritten = ~np.isin(np.arange(case.shape.slots), case.idx_mapping[live])
    states, _ = run_write(case, ends)
    np.testing.assert_array_equal(bits(states[LAYER, unwritten]), bits(case.arrays["states"][LAYER, unwritten]))


PUBLISHED = [
    Shape("bfloat16", rows=8, tokens=8, key_heads=16, group=2, key_dim=128, value_dim=128, slots=8),
    Shape("bfloat16", rows=32, tokens=16, key_heads=16, group=4, key_dim=128, value_dim=128, slots=32),
    Shape("float32", rows=1, tokens=1, key_heads=16, group=1, key_dim=64, value_dim=128, slots=8),
]


def abstract_arguments(shape: Shape, layers: int = 4) -> dict[str, jax.ShapeDtypeStruct]:
    def array(*dimensions, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dimensions, dtype)

    gates = array(shape.rows, shape.tokens, shape.value_heads)
    return {
        "qkv": array(shape.rows, shape.tokens, shape.channels, dtype=shape.dtype),
        "g": gates,
        "beta": gates,
        "conv_weight": array(shape.channels, shape.width, dtype=shape.dtype),
        "states": array(layers, shape.slots, shape.value_heads, shape.key_dim, shape.value_dim),
        "conv_inputs": array(layers, shape.slots, shape.channels, shape.width - 1, dtype=shape.dtype),
        "idx_mapping": array(shape.rows, dtype=jnp.int32),
        "q_len": array(shape.rows, dtype=jnp.int32),
    }


def _lowers(run, *arguments) -> str:
    return jax.export.export(jax.jit(run), platforms=["cuda"])(*arguments).mlir_module()


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda s: f"{s.rows}x{s.tokens} {s.dtype} {s.key_dim}")
def test_kernels_lower_for_cuda(shape):
    arguments = abstract_arguments(shape)
    chosen = {"implementation": "mosaic_gpu"}
    text = _lowers(lambda a: gated_delta_block(**a, layer=1, **chosen), arguments)
    assert text.count("custom_call @mosaic_gpu") == 1

    ingredients = Ingredients(
        qkv=arguments["qkv"],
        k=jax.ShapeDtypeStruct((shape.rows, shape.tokens, shape.key_heads, shape.key_dim), jnp.float32),
        v=jax.ShapeDtypeStruct((shape.rows, shape.tokens, shape.value_heads, shape.value_dim), jnp.float32),
        g=arguments["g"],
        beta=arguments["beta"],
    )
    fold = functools.partial(fold_block, **chosen)
    tables, indices = (arguments["states"], arguments["conv_inputs"]), (arguments["idx_mapping"], arguments["q_len"])
    text = _lowers(fold, *tables, [ingredients] * 4, *indices)
    # All layers call one kernel.
    assert (text.count("custom_call @mosaic_gpu"), text.count("call @_write_block")) == (1, 4)

    prompt = abstract_arguments(dataclasses.replace(shape, tokens=200))
    assert "custom_call @mosaic_gpu" in _lowers(lambda a: gated_delta_prefill(**a, layer=1, **chosen), prompt)


@pytest.mark.parametrize(
    ("module", "change", "reason"),
    [
        (mosaic_gpu, {"value_dim": 64}, "value_dim 64 is not a multiple of 128"),
        (mosaic_gpu, {"key_dim": 256}, "key_dim 256 is more than 128"),
        (mosaic_gpu_chunks, {"dtype": "float16"}, "projections float16"),
        (mosaic_gpu_chunks, {"key_dim": 96}, "key_dim 96 is not 64 or 128"),
    ],
)
def test_unsupported_shapes_have_a_reason(module, change, reason):
    arguments = abstract_arguments(dataclasses.replace(PUBLISHED[0], **change))
    reasons = []
    jax.eval_shape(
        lambda *operands: reasons.append(module.unsupported(*operands)),
        *(arguments[name] for name in ("states", "conv_inputs", "qkv")),
    )
    assert reason in reasons[0]


def test_unsupported_shapes_fall_back_to_xla_and_say_why(caplog):
    case = make_case(Shape(), idx_mapping=[2, 0, 3], q_len=[5, 5, 5])
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        out, _ = gated_delta_block(**case.arguments, layer=LAYER, implementation="mosaic_gpu")
    assert "gated_delta_block falls back from mosaic_gpu to xla: value_dim 8" in caplog.text
    check_outputs(case, out)
