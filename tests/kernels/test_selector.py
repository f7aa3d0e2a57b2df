"""One suite for every implementation of `select_path`: each choice is the reference's, given the one before."""

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
from dflash_jax.kernels.selector import mosaic_gpu, select_path
from dflash_jax.kernels.selector.xla import edge_scores

LONG = settings.default.max_examples > 100
EXAMPLES = settings.default.max_examples if LONG else 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
VOCAB = 48

every_implementation = pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static about a case."""

    dtype: str = "float32"
    rows: int = 2
    drafts: int = 4
    top_k: int = 5
    rank: int = 32
    noisy: bool = True


# A simulated kernel costs seconds to compile: shapes are a list, and what they hold is drawn.
SHAPES = [
    Shape(),
    Shape("bfloat16", rows=2, drafts=3, top_k=16, rank=64),
    Shape("float32", rows=1, drafts=7, top_k=8, rank=96, noisy=False),
    Shape("bfloat16", rows=1, drafts=7, top_k=16, rank=256),
    Shape("float32", rows=3, drafts=1, top_k=16, rank=32),
    Shape("float32", rows=1, drafts=12, top_k=3, rank=256),
    Shape("bfloat16", rows=2, drafts=16, top_k=4, rank=128),
    Shape("bfloat16", rows=3, drafts=5, top_k=1, rank=192, noisy=False),
    Shape("float32", rows=2, drafts=2, top_k=2, rank=160),
    Shape("bfloat16", rows=4, drafts=15, top_k=10, rank=64),
]


def make_case(shape: Shape, temperature, seed: int = 0) -> dict[str, jax.Array | None]:
    """Arguments with random contents. The codes of tokens that are no candidates are NaN."""
    rng = np.random.default_rng(seed)
    tokens = rng.permuted(np.tile(np.arange(VOCAB), (shape.rows, shape.drafts, 1)), axis=-1)[..., : shape.top_k]
    anchor = rng.integers(0, VOCAB, shape.rows)

    def codebook(used):
        values = rng.standard_normal((VOCAB, shape.rank)) * shape.rank**-0.25
        values[~np.isin(np.arange(VOCAB), used)] = np.nan
        return jnp.asarray(values, shape.dtype)

    noise = rng.gumbel(size=tokens.shape) if shape.noisy else None
    return {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "unary": jnp.asarray(rng.standard_normal(tokens.shape), jnp.float32),
        "gate": jnp.asarray(
            rng.standard_normal((shape.rows, shape.drafts, shape.rank)) * shape.rank**-0.25, shape.dtype
        ),
        "anchor": jnp.asarray(anchor, jnp.int32),
        "predecessor_codebook": codebook(np.concatenate([tokens[:, :-1].ravel(), anchor])),
        "successor_codebook": codebook(tokens),
        "temperature": jnp.asarray(temperature, jnp.float32),
        "noise": None if noise is None else jnp.asarray(noise, jnp.float32),
    }


def compute(implementation: str, shape: Shape, arguments) -> tuple[np.ndarray, np.ndarray]:
    """The implementation's answer; that of "mosaic_gpu" from the simulator, which looks for races."""
    if implementation == "mosaic_gpu":
        with mosaic.simulated():
            return tuple(np.asarray(x) for x in _jitted(implementation, shape)(arguments))
    return tuple(np.asarray(x) for x in _jitted(implementation, shape)(arguments))


@functools.cache
def _jitted(implementation: str, shape: Shape):
    return jax.jit(lambda arguments: select_path(**arguments, implementation=implementation))


def check(implementation: str, shape: Shape, arguments) -> None:
    """Every chosen token scores best after the one chosen before it, and q is the softmax of those scores."""
    path, probs = compute(implementation, shape, arguments)
    wide = _wide(arguments)
    tokens, temperature = wide["tokens"], wide["temperature"]
    names = ("tokens", "unary", "gate", "anchor", "predecessor_codebook", "successor_codebook")
    with jax.enable_x64(True):
        edges = np.asarray(edge_scores(**{name: jnp.asarray(wide[name]) for name in names}))
    assert edges.dtype == np.float64 and np.isfinite(edges).all()
    tolerance = TOLERANCE[shape.dtype]
    for row in range(shape.rows):
        before = 0
        for position in range(shape.drafts):
            (chosen,) = np.flatnonzero(tokens[row, position] == path[row, position])
            scores = edges[row, position, before] / (temperature[row] or 1)
            expected = np.eye(shape.top_k)[chosen]
            drawn = scores
            if temperature[row] and shape.noisy:
                drawn = scores + wide["noise"][row, position]
                expected = np.exp(scores - scores.max())
                expected /= expected.sum()
            allowed = tolerance * max(1, 1 / (temperature[row] or 1)) * max(1, np.abs(drawn).max())
            assert drawn[chosen] >= drawn.max() - allowed, f"row {row} leaves the best path at {position}"
            np.testing.assert_allclose(probs[row, position], expected, rtol=0, atol=allowed)
            before = chosen


def _wide(arguments) -> dict[str, np.ndarray]:
    """Floats as float64, which NumPy holds whatever JAX's mode."""
    return {
        name: np.asarray(value) if value.dtype == jnp.int32 else np.asarray(value, np.float64)
        for name, value in arguments.items()
        if value is not None
    }


@st.composite
def cases(draw):
    shape = draw(st.sampled_from(SHAPES if LONG else SHAPES[:3]))
    heat = st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0] if shape.noisy else [0.0])
    temperature = [draw(heat) for _ in range(shape.rows)]
    return shape, make_case(shape, temperature, seed=draw(st.integers(0, 2**32 - 1)))


@every_implementation
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_drawn_cases_agree_with_the_reference(implementation, case):
    check(implementation, *case)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_many_positions_are_walked_in_a_loop_and_as_few_are(implementation):
    """Unrolled, the walk of a `draft.k` of 99 takes minutes to compile."""
    shape = Shape(drafts=99)
    arguments = make_case(shape, [0.0, 0.7])
    check(implementation, shape, arguments)
    path, probs = compute(implementation, shape, arguments)
    few = dataclasses.replace(shape, drafts=7)
    cut = {name: x[:, :7] if name in ("tokens", "unary", "gate", "noise") else x for name, x in arguments.items()}
    first_path, first_probs = compute(implementation, few, cut)
    np.testing.assert_array_equal(path[:, :7], first_path)
    np.testing.assert_allclose(probs[:, :7], first_probs, rtol=1e-6)

    def size(shape):
        run = functools.partial(select_path, implementation=implementation)
        return str(jax.make_jaxpr(run)(*make_case(shape, [0.0, 0.7]).values())).count(" = ")

    assert size(shape) < size(dataclasses.replace(shape, drafts=8)) and size(shape) == size(
        dataclasses.replace(shape, drafts=50)
    )


@every_implementation
def test_each_choice_follows_the_one_before(implementation):
    for seed in range(4):
        check(implementation, SHAPES[0], make_case(SHAPES[0], [0.0, 0.7], seed=seed))


@every_implementation
def test_of_equal_scores_the_first_candidate_wins(implementation):
    arguments = make_case(SHAPES[0], [0.0, 0.0])
    arguments |= {name: jnp.zeros_like(arguments[name]) for name in ("unary", "gate")}
    path, probs = compute(implementation, SHAPES[0], arguments)
    np.testing.assert_array_equal(path, arguments["tokens"][..., 0])
    np.testing.assert_array_equal(probs[..., 0], 1)


def abstract_arguments(shape: Shape, vocab: int = 151_936) -> dict[str, jax.ShapeDtypeStruct]:
    def array(*dimensions, dtype):
        return jax.ShapeDtypeStruct(dimensions, dtype)

    candidates = (shape.rows, shape.drafts, shape.top_k)
    return {
        "tokens": array(*candidates, dtype=jnp.int32),
        "unary": array(*candidates, dtype=jnp.float32),
        "gate": array(shape.rows, shape.drafts, shape.rank, dtype=shape.dtype),
        "anchor": array(shape.rows, dtype=jnp.int32),
        "predecessor_codebook": array(vocab, shape.rank, dtype=shape.dtype),
        "successor_codebook": array(vocab, shape.rank, dtype=shape.dtype),
        "temperature": array(shape.rows, dtype=jnp.float32),
        "noise": array(*candidates, dtype=jnp.float32) if shape.noisy else None,
    }


LOWERED = [
    Shape("bfloat16", rows=8, drafts=7, top_k=16, rank=256),
    Shape("bfloat16", rows=32, drafts=16, top_k=16, rank=256),
    Shape("bfloat16", rows=1, drafts=15, top_k=8, rank=64, noisy=False),
    Shape("float32", rows=8, drafts=7, top_k=16, rank=256),
]


@pytest.mark.parametrize("shape", LOWERED, ids=lambda s: f"{s.rows}x{s.drafts} {s.dtype} {s.rank}")
def test_mosaic_gpu_lowers_for_cuda(shape):
    exported = jax.export.export(_jitted("mosaic_gpu", shape), platforms=["cuda"])(abstract_arguments(shape))
    assert "mosaic_gpu" in exported.mlir_module()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rank": 8}, "rank 8"),
        ({"top_k": 17}, "17 candidates"),
        ({"dtype": "float16"}, "float16"),
        ({"drafts": 16, "rank": 256}, "codes of 16 positions"),
    ],
)
def test_unsupported_shapes_have_a_reason(change, reason):
    arguments = make_case(dataclasses.replace(SHAPES[0], **change), [0.0, 0.7])
    names = ("tokens", "gate", "predecessor_codebook", "successor_codebook")
    assert reason in mosaic_gpu.unsupported(*(arguments[name] for name in names))


def test_unsupported_shapes_fall_back_to_xla_and_say_why(caplog):
    shape = dataclasses.replace(SHAPES[0], rank=8)
    arguments = make_case(shape, [0.0, 0.7])
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        path, probs = _jitted("mosaic_gpu", shape)(arguments)
    assert len(caplog.records) == 1 and "select_path falls back from mosaic_gpu to xla: rank 8" in caplog.text
    expected = _jitted("xla", shape)(arguments)
    np.testing.assert_array_equal(path, expected[0])
    np.testing.assert_array_equal(probs, expected[1])
