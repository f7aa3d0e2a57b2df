"""One suite for every implementation of `best_tokens`: the best logits, and of equal ones the lowest ids."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_jax.kernels import dispatch, mosaic
from dflash_jax.kernels.lm_head import best_tokens, mosaic_gpu

LONG = settings.default.max_examples > 100
EXAMPLES = settings.default.max_examples if LONG else 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

# Cases run once or twice each, so it is the compiler's time that counts.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

every_implementation = pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static about a case."""

    dtype: str = "float32"
    rows: int = 3
    hidden: int = 64
    vocab: int = 264
    tied: bool = True
    top_k: int = 4
    multiplier: float = 1.0
    softcap: float | None = None
    shares: int | None = 2

    @property
    def static(self) -> dict:
        names = ("top_k", "multiplier", "softcap")
        return {"layout": "out_in" if self.tied else "in_out"} | {name: getattr(self, name) for name in names}


# A simulated kernel costs seconds to compile: shapes are a list, and what they hold is drawn.
SHAPES = [
    Shape(),
    Shape("bfloat16", rows=5, hidden=128, vocab=200, tied=False, top_k=1, shares=1),
    Shape("bfloat16", rows=70, hidden=64, vocab=392, tied=True, top_k=16, multiplier=0.5, shares=3),
    Shape("float32", rows=2, hidden=128, vocab=72, tied=False, top_k=8, multiplier=0.8, softcap=3.0, shares=None),
    Shape("bfloat16", rows=64, hidden=192, vocab=128, tied=False, top_k=9, softcap=20.0),
    Shape("float32", rows=1, hidden=320, vocab=136, tied=True, top_k=1, shares=None),
    Shape("bfloat16", rows=130, hidden=64, vocab=256, tied=True, top_k=2),
    Shape("float32", rows=66, hidden=64, vocab=64, tied=False, top_k=16),
]


def make_case(shape: Shape, seed: int = 0, whole: bool = False) -> dict[str, jax.Array]:
    """Random arguments; if `whole`, of so few small integers that logits are exact and mostly equal."""
    rng = np.random.default_rng(seed)

    def array(*dimensions, scale):
        values = rng.integers(-1, 2, dimensions) if whole else rng.standard_normal(dimensions) * scale
        return jnp.asarray(values, shape.dtype)

    head = (shape.vocab, shape.hidden) if shape.tied else (shape.hidden, shape.vocab)
    hidden = array(shape.rows, shape.hidden, scale=1)
    if whole:
        hidden = hidden.at[:, rng.permutation(shape.hidden)[4:]].set(0)
    return {
        "hidden": hidden,
        "weight": array(*head, scale=shape.hidden**-0.5),
    }


def compute(implementation: str, shape: Shape, arguments) -> tuple[np.ndarray, np.ndarray]:
    """The implementation's answer; that of "mosaic_gpu" from the simulator, which looks for races."""
    if implementation == "mosaic_gpu":
        with mosaic.simulated():
            return tuple(np.asarray(x) for x in _jitted(implementation, shape)(arguments))
    return tuple(np.asarray(x) for x in _jitted(implementation, shape)(arguments))


@functools.cache
def _jitted(implementation: str, shape: Shape):
    if implementation == "mosaic_gpu":
        return jax.jit(
            lambda arguments: mosaic_gpu.best_tokens(**arguments, **shape.static, shares=shape.shares),
            compiler_options=_QUICK,
        )
    return jax.jit(lambda arguments: best_tokens(**arguments, **shape.static, implementation=implementation))


def check(implementation: str, shape: Shape, arguments, exact: bool = False) -> None:
    """Compares with all logits in float64; `exact` if no rounding can have changed their order."""
    values, ids = compute(implementation, shape, arguments)
    assert values.shape == ids.shape == (shape.rows, shape.top_k) and values.dtype == np.float32
    hidden, weight = (np.asarray(arguments[name], np.float64) for name in ("hidden", "weight"))
    logits = hidden @ (weight.T if shape.tied else weight) * shape.multiplier
    if shape.softcap is not None:
        logits = shape.softcap * np.tanh(logits / shape.softcap)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : shape.top_k]
    tolerance = TOLERANCE[shape.dtype]
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    close(values, np.take_along_axis(logits, order, axis=-1))
    close(np.take_along_axis(logits, ids, axis=-1), values)
    assert all(len(set(row)) == shape.top_k for row in ids.tolist()), "no token is listed twice"
    if exact:
        np.testing.assert_array_equal(ids, order)


@st.composite
def cases(draw):
    shape = draw(st.sampled_from(SHAPES if LONG else SHAPES[:3]))
    whole = draw(st.booleans())
    return shape, make_case(shape, draw(st.integers(0, 2**32 - 1)), whole), whole and shape.softcap is None


@every_implementation
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_drawn_cases_agree_with_the_reference(implementation, case):
    check(implementation, *case)


@every_implementation
def test_of_equal_logits_the_lowest_ids_win(implementation):
    for seed in range(3):
        check(implementation, SHAPES[0], make_case(SHAPES[0], seed, whole=True), exact=True)


@every_implementation
def test_all_logits_equal(implementation):
    arguments = make_case(SHAPES[0]) | {"hidden": jnp.zeros((SHAPES[0].rows, SHAPES[0].hidden))}
    _, ids = compute(implementation, SHAPES[0], arguments)
    np.testing.assert_array_equal(ids, np.tile(np.arange(SHAPES[0].top_k), (SHAPES[0].rows, 1)))


def test_a_row_of_nan_names_tokens_and_spoils_no_other():
    arguments = make_case(SHAPES[0])
    expected = compute("mosaic_gpu", SHAPES[0], arguments)
    values, ids = compute("mosaic_gpu", SHAPES[0], arguments | {"hidden": arguments["hidden"].at[1].set(jnp.nan)})
    assert ((ids >= 0) & (ids < SHAPES[0].vocab)).all()
    for row in (0, 2):
        np.testing.assert_array_equal(ids[row], expected[1][row])
        np.testing.assert_array_equal(values[row], expected[0][row])


QWEN3_8B = Shape("bfloat16", hidden=4096, vocab=151_936, tied=False, top_k=16)
LOWERED = [
    dataclasses.replace(QWEN3_8B, rows=7),
    dataclasses.replace(QWEN3_8B, rows=64, top_k=1, tied=True),
    dataclasses.replace(QWEN3_8B, rows=224, softcap=20.0, multiplier=0.8),
    dataclasses.replace(QWEN3_8B, rows=256, top_k=1),
    dataclasses.replace(QWEN3_8B, rows=512, hidden=5120, vocab=248_320, tied=True),
    dataclasses.replace(QWEN3_8B, rows=56, dtype="float32"),
]


@pytest.mark.parametrize("shape", LOWERED, ids=lambda s: f"{s.rows} rows, top {s.top_k}, {s.dtype}, tied {s.tied}")
def test_mosaic_gpu_lowers_for_cuda(shape):
    head = (shape.vocab, shape.hidden) if shape.tied else (shape.hidden, shape.vocab)
    arguments = {
        "hidden": jax.ShapeDtypeStruct((shape.rows, shape.hidden), shape.dtype),
        "weight": jax.ShapeDtypeStruct(head, shape.dtype),
    }
    function = jax.jit(lambda arguments: best_tokens(**arguments, **shape.static, implementation="mosaic_gpu"))
    exported = jax.export.export(function, platforms=["cuda"])(arguments)
    assert "mosaic_gpu" in exported.mlir_module()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 48}, "hidden size 48"),
        ({"vocab": 100}, "vocabulary 100"),
        ({"vocab": 48}, "vocabulary 48"),
        ({"top_k": 17}, "top_k 17"),
        ({"rows": 513}, "513 rows"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_unsupported_shapes_have_a_reason(change, reason):
    shape = dataclasses.replace(SHAPES[0], **change)
    assert reason in mosaic_gpu.unsupported(**make_case(shape), layout=shape.static["layout"], top_k=shape.top_k)


def test_unsupported_shapes_fall_back_to_xla_and_say_why(caplog):
    shape = dataclasses.replace(SHAPES[0], hidden=48)
    arguments = make_case(shape)
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        values, ids = best_tokens(**arguments, **shape.static, implementation="mosaic_gpu")
    assert len(caplog.records) == 1 and "best_tokens falls back from mosaic_gpu to xla: hidden size 48" in caplog.text
    expected = best_tokens(**arguments, **shape.static, implementation="xla")
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(ids, expected[1])
