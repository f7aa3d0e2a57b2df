"""One suite for every implementation of `block_attention`: each agrees with the reference in float64."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_jax.kernels import dispatch
from dflash_jax.kernels import native as kernels_native
from dflash_jax.kernels.block_attention import block_attention, mosaic_gpu, mosaic_gpu_kernel, mosaic_gpu_tiles, native
from tests.kernels.attention_cases import LAYER, Case, Shape, check, compute, make_case

# A simulated GPU takes seconds per case, most of them to compile it.
EXAMPLES = settings.default.max_examples if settings.default.max_examples > 100 else 5

needs_native = pytest.mark.usefixtures("native_code")


@pytest.fixture(params=["xla", "mosaic_gpu", "native"])
def implementation(request):
    """Each that this machine has."""
    if request.param == "native":
        request.getfixturevalue("native_code")
    return request.param


@st.composite
def cases(draw) -> Case:
    page_size = draw(st.sampled_from([16, 32, 48, 64, 128]))
    # Simulated CTAs cost milliseconds each: the large shapes are drawn with few of them.
    queries = draw(st.one_of(st.integers(1, 9), st.sampled_from([17, 40, 70])))
    head_dim = draw(st.sampled_from([32, 64, 128, 256]))
    slot_pages = draw(st.integers(1, max(1, 320 // page_size)))
    length = slot_pages * page_size
    shape = Shape(
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        rows=draw(st.integers(1, 3)),
        queries=queries,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 8, 16] if queries <= 17 else [1, 2])),
        head_dim=head_dim,
        page_size=page_size,
        slots=4,
        slot_pages=slot_pages,
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.integers(1, 40), st.integers(1, length + queries))),
        splits=draw(st.sampled_from([1, 2, 3, None])),
    )
    lengths = st.one_of(st.integers(0, length), st.integers(0, slot_pages).map(lambda n: n * page_size))
    shared = draw(st.integers(0, slot_pages))
    context_len = [draw(lengths) for _ in range(shape.slots)]
    context_len[1] = max(context_len[1], context_len[0]) if shared else context_len[1]
    return make_case(
        shape,
        context_len=context_len,
        idx_mapping=draw(st.permutations([*range(shape.slots), -1, -1]))[: shape.rows],
        q_len=[draw(st.one_of(st.just(queries), st.integers(0, queries))) for _ in range(shape.rows)],
        seed=draw(st.integers(0, 2**32 - 1)),
        shared_pages=shared,
    )


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_drawn_cases_agree_with_the_reference(implementation, case):
    check(implementation, case)


SMALL = Shape()
PAGE = SMALL.page_size


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(0, id="context 0"),
        pytest.param(PAGE, id="exactly one page"),
        pytest.param(PAGE - 1, id="page boundary minus one"),
        pytest.param(PAGE + 1, id="page boundary plus one"),
        pytest.param(3 * PAGE, id="full table"),
    ],
)
def test_context_of(implementation, context):
    check(
        implementation, make_case(SMALL, context_len=[7, context, 20, context], idx_mapping=[3, 1, 2], q_len=[5, 1, 4])
    )


@pytest.mark.parametrize("causal", [True, False])
def test_window_smaller_than_a_page(implementation, causal):
    shape = dataclasses.replace(SMALL, causal=causal, window=4)
    check(implementation, make_case(shape, context_len=[1, 40, 17, 48], idx_mapping=[1, 2, 3], q_len=[5, 5, 3]))


def test_empty_row_in_the_middle(implementation):
    check(implementation, make_case(SMALL, context_len=[9, 30, 0, 5], idx_mapping=[1, -1, 0], q_len=[5, 5, 2]))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("implementation", ["xla", "native"], indirect=True)
def test_more_rows_than_a_tile_of_xla(implementation, window):
    shape = dataclasses.replace(SMALL, rows=19, slots=20, slot_pages=6, window=window)
    context_len = np.random.default_rng(3).permutation(np.linspace(0, 6 * PAGE, 20).astype(int))
    idx_mapping = np.random.default_rng(4).permutation([*range(2, 18), -1, -1, -1])
    check(implementation, make_case(shape, context_len=context_len, idx_mapping=idx_mapping, q_len=np.arange(19) % 6))


def test_two_slots_share_pages(implementation):
    case = make_case(SMALL, context_len=[40, 45, 1, 1], idx_mapping=[1, 0, 2], q_len=[5, 5, 5], shared_pages=2)
    assert (case.block_table[0, :2] == case.block_table[1, :2]).all()
    check(implementation, case)


def test_nan_outside_the_context_never_reaches_the_output(implementation):
    case = make_case(SMALL, context_len=[33, 16, 1, 0], idx_mapping=[0, 3, 1], q_len=[3, 5, 0])
    poisoned = [name for name, value in case.arrays.items() if np.isnan(np.asarray(value)).any()]
    assert poisoned == ["q", "k_block", "v_block", "k_pages", "v_pages"]
    assert np.isfinite(compute(implementation, case)).all()
    check(implementation, case)


def test_mosaic_gpu_does_not_depend_on_the_split():
    results = []
    for splits in (1, 3):
        shape = dataclasses.replace(SMALL, page_size=64, splits=splits)
        case = make_case(shape, context_len=[192, 100, 65, 3], idx_mapping=[0, 2, 3], q_len=[5, 5, 5])
        results.append(compute("mosaic_gpu", case).astype(np.float64))
    np.testing.assert_allclose(results[1], results[0], atol=2e-6)


@needs_native
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("context", [0, 61, 100])
def test_natively_a_token_is_the_same_bits_alone_and_in_a_block(context, window):
    """Wherever those before it are: in the block with it, or in the pages."""
    tokens, heads, kv_heads, head_dim, page_size = 5, 6, 2, 36, 16
    draw = np.random.default_rng(0)
    k_pages, v_pages = draw.standard_normal((2, 1, 7, page_size, kv_heads, head_dim)).astype(np.float32)
    q = draw.standard_normal((1, tokens, heads, head_dim)).astype(np.float32)
    table = jnp.asarray([[3, 0, 6, 1, 2, 5, 4]])
    k_all, v_all = (pages[0, table[0]].reshape(1, -1, kv_heads, head_dim) for pages in (k_pages, v_pages))

    def attend(first, count):
        begin, end = context + first, context + first + count
        return native.block_attention(
            jnp.asarray(q[:, first : first + count]),
            jnp.asarray(k_all[:, begin:end]),
            jnp.asarray(v_all[:, begin:end]),
            jnp.asarray(k_pages),
            jnp.asarray(v_pages),
            table,
            *map(jnp.asarray, ([0], [begin], [count])),
            layer=0,
            causal=True,
            window=window,
            scale=0.2,
        )

    together = attend(0, tokens)
    np.testing.assert_array_equal(jnp.concatenate([attend(token, 1) for token in range(tokens)], axis=1), together)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "page_size", "group"), [(37, 5, 3), (5, 1, 7), (64, 1, 1), (33, 7, 17)])
def test_natively_no_size_must_be_a_round_one(head_dim, page_size, group, dtype):
    shape = Shape(
        dtype=dtype, head_dim=head_dim, page_size=page_size, group=group, kv_heads=2, slot_pages=90 // page_size
    )
    check("native", make_case(shape, context_len=[70, 31, 1, 0], idx_mapping=[1, 0, 3], q_len=[5, 3, 5]))


@needs_native
def test_natively_many_at_once_wait_for_nobody():
    """Calls that are independent run side by side on the threads that each would like to use."""
    shape = dataclasses.replace(SMALL, kv_heads=2, page_size=64, slot_pages=8)
    case = make_case(shape, context_len=[512, 500, 301, 7], idx_mapping=[1, 2, 0], q_len=[5, 5, 5])
    static = {"layer": LAYER, "causal": True, "window": None, "scale": 0.1}

    @jax.jit
    def run(arguments):
        return [native.block_attention(**arguments | {"q": arguments["q"] * n}, **static) for n in range(16)]

    for _ in range(20):
        results = run(case.arguments)
    for n in (1, 15):
        arguments = case.arguments | {"q": case.arguments["q"] * n}
        expected = block_attention(**arguments, **static, implementation="xla")
        np.testing.assert_allclose(results[n], expected, atol=1e-5)


@needs_native
def test_natively_it_can_be_mapped():
    case = make_case(SMALL, context_len=[9, 30, 20, 5], idx_mapping=[1, 0, 3], q_len=[5, 5, 5])
    attend = functools.partial(native.block_attention, layer=LAYER, causal=True, window=None, scale=0.1)
    several = jnp.stack([case.arguments["q"], case.arguments["q"] * 2])
    mapped = jax.vmap(lambda q: attend(**case.arguments | {"q": q}))(several)
    for q, out in zip(several, mapped, strict=True):
        np.testing.assert_array_equal(out, attend(**case.arguments | {"q": q}))


@needs_native
def test_natively_long_contexts():
    shape = dataclasses.replace(SMALL, kv_heads=2, rows=3, page_size=64, slot_pages=32)
    check("native", make_case(shape, context_len=[2048, 1500, 1, 0], idx_mapping=[1, 2, 0], q_len=[5, 5, 4]))


@needs_native
def test_scores_of_any_size_are_exact_where_floats_are():
    """One key so much better than the others that only it counts, at both ends of what exponentials can do."""
    shape = dataclasses.replace(SMALL, rows=1)
    case = make_case(shape, context_len=[40, 1, 1, 1], idx_mapping=[0], q_len=[5])
    for scale in (100.0, -100.0, 1e-20):
        scaled = dataclasses.replace(case, arrays=case.arrays | {"q": case.arrays["q"] * scale})
        check("native", scaled)


def test_the_platform_chooses_native_code_for_few_tokens_only(native_code, monkeypatch):
    def chosen(queries, dtype="float32", pages="float32", implementation=None, v_pages=None):
        case = make_case(
            dataclasses.replace(SMALL, queries=queries, dtype=dtype),
            context_len=[9, 30, 20, 5],
            idx_mapping=[1, 0, 3],
            q_len=[queries] * 3,
        )
        pools = {"k_pages": pages, "v_pages": v_pages or pages}
        arguments = case.arguments | {name: case.arguments[name].astype(kind) for name, kind in pools.items()}
        static = {"layer": LAYER, "causal": True, "window": None, "scale": 0.1, "implementation": implementation}
        return "dflash_attend" in str(jax.make_jaxpr(functools.partial(block_attention, **static))(**arguments))

    assert chosen(1) and chosen(native.MOST_QUERIES) and chosen(4, "bfloat16", "bfloat16")
    assert not chosen(native.MOST_QUERIES + 1)
    assert not chosen(4, "float16", "float16")
    assert not chosen(4, "float32", "bfloat16")
    assert not chosen(4, v_pages="bfloat16")
    assert not chosen(4, implementation="xla")
    monkeypatch.setattr(kernels_native, "available", lambda: False)
    assert not chosen(4)


def mutant(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """The module, with one piece of its source replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is not in {module.__name__} once"
    clone = types.ModuleType(module.__name__)
    assert module.__file__ is not None
    exec(compile(source.replace(old, new), module.__file__, "exec"), clone.__dict__)
    # The mutant's values are handed to functions that are not mutated, and that check what they get.
    classes = {name: value for name, value in vars(module).items() if dataclasses.is_dataclass(value)}
    clone.__dict__.update(classes)
    return clone


MUTANTS = {
    "reads the context of the row, not of its slot": (mosaic_gpu_tiles, "slot = jnp.maximum(mapped, 0)", "slot = row"),
    "reads the pages of the row, not of its slot": (
        mosaic_gpu_tiles,
        "self.block_table[work.slot, logical]",
        'self.block_table[lax.axis_index("row"), logical]',
    ),
    "lets NaN past the context in": (mosaic_gpu_kernel, "_rows_below(count, source[:, slab])", "source[:, slab]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    case = make_case(SMALL, context_len=[9, 30, 20, 5], idx_mapping=[1, 0, 3], q_len=[5, 5, 5])
    check("mosaic_gpu", case)
    module, old, new = MUTANTS[name]
    changed = mutant(module, old, new)
    if module is mosaic_gpu_kernel:
        monkeypatch.setattr(mosaic_gpu, "kernel", changed.kernel)
    else:
        monkeypatch.setattr(mosaic_gpu_kernel, "work_of_cta", changed.work_of_cta)
        monkeypatch.setattr(mosaic_gpu_kernel, "Loader", changed.Loader)
    with pytest.raises(AssertionError, match=r"Mismatched elements|nan location mismatch"):
        check("mosaic_gpu", case, jit=functools.partial(jax.jit))


def abstract_arguments(shape: Shape, layers: int = 36, pages: int = 16_000) -> dict[str, jax.ShapeDtypeStruct]:
    def array(*dimensions, dtype=shape.dtype):
        return jax.ShapeDtypeStruct(dimensions, dtype)

    pool = array(layers, pages, shape.page_size, shape.kv_heads, shape.head_dim)
    block = array(shape.rows, shape.queries, shape.kv_heads, shape.head_dim)
    return {
        "q": array(shape.rows, shape.queries, shape.kv_heads * shape.group, shape.head_dim),
        "k_block": block,
        "v_block": block,
        "k_pages": pool,
        "v_pages": pool,
        "block_table": array(64, 40_960 // shape.page_size, dtype=jnp.int32),
        "idx_mapping": array(shape.rows, dtype=jnp.int32),
        "context_len": array(64, dtype=jnp.int32),
        "q_len": array(shape.rows, dtype=jnp.int32),
    }


QWEN3_8B = Shape(dtype="bfloat16", kv_heads=8, group=4, head_dim=128)
LOWERED = [
    *(
        dataclasses.replace(QWEN3_8B, rows=rows, queries=queries, page_size=page_size)
        for rows, queries, page_size in [
            *((1, 1, 16), (8, 1, 64), (32, 1, 128)),
            *((1, 8, 128), (8, 8, 16), (32, 8, 32)),
            *((1, 9, 64), (8, 9, 128), (32, 9, 16)),
            *((1, 17, 32), (8, 17, 16), (32, 17, 64)),
            *((1, 128, 16), (8, 128, 128)),
        ]
    ),
    *(
        dataclasses.replace(QWEN3_8B, rows=rows, queries=8, causal=False, window=2048, group=group)
        for rows, group in [(1, 4), (32, 8)]
    ),
    dataclasses.replace(QWEN3_8B, head_dim=64, group=16, queries=4),
    dataclasses.replace(QWEN3_8B, head_dim=256, kv_heads=4, queries=8),
    dataclasses.replace(QWEN3_8B, dtype="float32", queries=8),
    dataclasses.replace(QWEN3_8B, dtype="float32", head_dim=256, kv_heads=2, queries=8),
]


@pytest.mark.parametrize("shape", LOWERED, ids=lambda s: f"{s.rows}x{s.queries} {s.dtype} {s.head_dim} p{s.page_size}")
def test_mosaic_gpu_lowers_for_cuda(shape):
    def attend(arguments):
        static = {"layer": LAYER, "causal": shape.causal, "window": shape.window, "scale": 0.1}
        return block_attention(**arguments, **static, implementation="mosaic_gpu")

    exported = jax.export.export(jax.jit(attend), platforms=["cuda"])(abstract_arguments(shape))
    assert exported.mlir_module().count("mosaic_gpu") >= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 8}, "head_dim 8"),
        ({"page_size": 12, "slot_pages": 4}, "page_size 12"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_unsupported_shapes_fall_back_to_xla_and_say_so_once(change, reason, caplog):
    shape = dataclasses.replace(SMALL, **change)
    case = make_case(shape, context_len=[7, 16, 20, 3], idx_mapping=[3, 1, 2], q_len=[5, 1, 4])
    dispatch.log_once.cache_clear()
    static = {"layer": LAYER, "causal": True, "window": None, "scale": 0.1}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = block_attention(**case.arguments, **static, implementation="mosaic_gpu")
    assert len(caplog.records) == 1 and reason in caplog.text
    expected = block_attention(**case.arguments, **static, implementation="xla")
    np.testing.assert_array_equal(out, expected)


def test_splits_fill_the_gpu_and_no_more():
    assert 0.85 * 264 <= 8 * mosaic_gpu._splits(ctas=8, tiles=640, concurrent=264) <= 264
    assert mosaic_gpu._splits(ctas=64, tiles=640, concurrent=264) == 4
    assert mosaic_gpu._splits(ctas=8, tiles=3, concurrent=264) == 3, "a share has at least a tile"
    assert mosaic_gpu._splits(ctas=256, tiles=640, concurrent=264) == 1
