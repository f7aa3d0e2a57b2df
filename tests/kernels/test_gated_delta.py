"""One suite for every implementation of the gated delta rule: each agrees with the reference in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_jax.kernels.gated_delta import (
    RowStates,
    fold_block,
    gated_delta,
    gated_delta_block,
    gated_delta_prefill,
    gates,
    write_rows,
)
from tests.kernels.gated_delta_cases import (
    LAYER,
    LAYERS,
    Case,
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
from tests.pairs import GOLDEN

# A shape takes seconds to compile: they are a list, and what they hold is drawn.
SHAPES = [
    Shape(),
    Shape("bfloat16", rows=4, tokens=8, key_heads=1, group=3, key_dim=20, value_dim=33, slots=5),
    Shape(rows=2, tokens=1, key_heads=3, group=1, key_dim=8, value_dim=64, width=2),
    Shape(rows=1, tokens=17, key_heads=2, group=3, key_dim=1, value_dim=1),
    Shape("bfloat16", rows=3, tokens=2, key_heads=1, group=1, key_dim=64, value_dim=72),
]
SMALL = Shape()
FULL = {"idx_mapping": [2, 0, 3], "q_len": [5, 5, 5]}


@pytest.fixture(params=["xla", "native"])
def implementation(request):
    """Each that this machine has."""
    if request.param == "native":
        request.getfixturevalue("native_code")
    return request.param


@st.composite
def cases(draw) -> Case:
    shape = draw(st.sampled_from(SHAPES))
    return make_case(
        shape,
        idx_mapping=draw(st.permutations([*range(shape.slots), -1, -1]))[: shape.rows],
        q_len=[draw(st.one_of(st.just(shape.tokens), st.integers(0, shape.tokens))) for _ in range(shape.rows)],
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_drawn_blocks_agree_with_the_reference(implementation, case):
    out, block = run_block(implementation, case)
    check_outputs(case, out)
    check_tables(case, *run_fold(implementation, case, block, case.q_len))


@settings(suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_drawn_chunks_agree_with_the_reference(implementation, case):
    out, ends = run_prefill(implementation, case)
    check_outputs(case, out)
    check_tables(case, *run_write(case, ends))


def test_the_reference_agrees_with_transformers():
    """Outputs and final state of its `torch_recurrent_gated_delta_rule`, and of its gates."""
    with np.load(GOLDEN / "gated-delta.npz") as stored:
        given = {name: jnp.asarray(value) for name, value in stored.items()}
    g, beta = gates(given["a"], given["b"], given["a_log"], given["dt_bias"])
    np.testing.assert_allclose(g, given["g"], rtol=1e-6)
    np.testing.assert_allclose(beta, given["beta"], rtol=1e-6)
    rows, tokens, channels = given["qkv"].shape
    start = RowStates(
        state=jnp.zeros_like(given["state"]), conv_inputs=jnp.zeros((rows, channels, given["conv_weight"].shape[1] - 1))
    )
    for implementation in ("reference", "xla"):
        out, end = gated_delta(
            given["qkv"], g, beta, given["conv_weight"], jnp.full(rows, tokens), start, implementation=implementation
        )
        np.testing.assert_allclose(out, given["out"], atol=2e-6)
        np.testing.assert_allclose(end.state, given["state"], atol=5e-6)


@pytest.mark.parametrize("tokens", [64, 65, 150])
def test_more_tokens_than_a_chunk(implementation, tokens):
    shape = dataclasses.replace(SMALL, tokens=tokens)
    case = make_case(shape, idx_mapping=[2, -1, 3], q_len=[tokens, 5, tokens - 70 if tokens > 70 else 1])
    out, ends = run_prefill(implementation, case)
    check_outputs(case, out)
    check_tables(case, *run_write(case, ends))


@pytest.mark.parametrize("count", range(6))
def test_ragged_counts(implementation, count):
    case = make_case(SMALL, idx_mapping=[3, 1, 2], q_len=[count, 5 - count, 5])
    out, block = run_block(implementation, case)
    check_outputs(case, out)
    check_tables(case, *run_fold(implementation, case, block, case.q_len))
    out, ends = run_prefill(implementation, case)
    check_outputs(case, out)
    check_tables(case, *run_write(case, ends))


def test_state_handed_over_at_every_point(implementation):
    """Of the block by its fold, and of the chunk by its states, and of one to the other."""
    shape = dataclasses.replace(SMALL, tokens=7)
    whole = make_case(shape, idx_mapping=[2, 0, 3], q_len=[7, 7, 7])
    for split in range(1, 7):
        first, second = whole.part(0, split), whole.part(split, 7)
        out, block = run_block(implementation, first)
        folded = run_fold(implementation, first, block, first.q_len)
        after, ends = run_prefill(implementation, second.after(*folded))
        check_outputs(whole, jnp.concatenate([out, after], axis=1))
        check_tables(whole, *run_write(second.after(*folded), ends))

        out, ends = run_prefill(implementation, first)
        written = run_write(first, ends)
        after, block = run_block(implementation, second.after(*written))
        check_outputs(whole, jnp.concatenate([out, after], axis=1))
        check_tables(whole, *run_fold(implementation, second.after(*written), block, second.q_len))


def test_rejected_tokens_are_exactly_the_identity(implementation):
    """Whatever they are: the tables are the same bits as if the block had ended before them."""
    case = make_case(SMALL, **FULL)
    # -0 + 0 is 0: what a rejected token adds may not even be a zero.
    states = case.arrays["states"].at[LAYER, :, :, ::3].set(-0.0)
    case = case.after(states, case.arrays["conv_inputs"])
    _, block = run_block(implementation, case)
    for accepted in ([0, 0, 0], [5, 0, 2], [1, 4, 3]):
        tables = run_fold(implementation, case, block, accepted)
        poisoned = jax.tree.map(
            lambda x, accepted=accepted: jnp.where(
                (np.arange(5) < np.asarray(accepted)[:, None]).reshape(3, 5, *(1,) * (x.ndim - 2)), x, jnp.nan
            ),
            block,
        )
        for table, other in zip(tables, run_fold(implementation, case, poisoned, accepted), strict=True):
            np.testing.assert_array_equal(bits(table[LAYER]), bits(other[LAYER]))
        for table, before in zip(tables, (case.arrays["states"], case.arrays["conv_inputs"]), strict=True):
            untouched = [slot for slot, n in zip(case.idx_mapping, accepted, strict=True) if n == 0]
            np.testing.assert_array_equal(bits(table[LAYER, untouched]), bits(before[LAYER, untouched]))


def test_empty_rows_change_nothing(implementation):
    case = make_case(SMALL, idx_mapping=[-1, -1, -1], q_len=[5, 5, 5])
    tables = {name: case.arrays[name] for name in ("states", "conv_inputs")}
    case = case.after(*(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) for x in tables.values()))
    out, block = run_block(implementation, case)
    assert not np.asarray(out).any()
    tables = run_fold(implementation, case, block, [5, 5, 5])
    out, ends = run_prefill(implementation, case)
    assert not np.asarray(out).any()
    for table, other, before in zip(tables, run_write(case, ends), ("states", "conv_inputs"), strict=True):
        np.testing.assert_array_equal(table, case.arrays[before])
        np.testing.assert_array_equal(other, case.arrays[before])


def test_rows_find_their_slots_in_any_order(implementation):
    """Rows that change places, with the same slots, change nothing but the order of the outputs."""
    case = make_case(SMALL, **FULL)
    out, block = run_block(implementation, case)
    tables = run_fold(implementation, case, block, [2, 5, 3])
    order = np.array([2, 0, 1])
    arrays = case.arrays | {name: case.arrays[name][order] for name in ("qkv", "g", "beta")}
    moved = Case(case.shape, case.idx_mapping[order], case.q_len[order], arrays)
    moved_out, moved_block = run_block(implementation, moved)
    np.testing.assert_array_equal(moved_out, out[order])
    moved_tables = run_fold(implementation, moved, moved_block, np.array([2, 5, 3])[order])
    for table, other in zip(tables, moved_tables, strict=True):
        np.testing.assert_array_equal(other[LAYER], table[LAYER])


BITS = [
    SMALL,
    dataclasses.replace(SMALL, tokens=17, key_dim=32, value_dim=40),
    dataclasses.replace(SMALL, dtype="bfloat16", key_heads=1, group=3, key_dim=24, value_dim=64),
    dataclasses.replace(SMALL, key_heads=3, group=1, key_dim=64, value_dim=7, width=2),
]


@pytest.mark.parametrize("shape", BITS, ids=lambda s: f"{s.tokens} tokens {s.key_dim}x{s.value_dim} {s.dtype}")
def test_a_block_is_the_same_bits_as_its_tokens_one_by_one(implementation, shape):
    """Outputs and folded states, at every accepted count, alone and in company."""
    case = make_case(shape, idx_mapping=[2, 0, 3], q_len=[shape.tokens] * 3)
    out, block = run_block(implementation, case)
    states, conv_inputs = case.arrays["states"], case.arrays["conv_inputs"]
    for token in range(shape.tokens):
        one = case.part(token, token + 1).after(states, conv_inputs)
        alone = dataclasses.replace(one, idx_mapping=np.array([-1, 0, -1]))
        one_out, one_block = run_block(implementation, one)
        np.testing.assert_array_equal(one_out[:, 0], out[:, token])
        np.testing.assert_array_equal(run_block(implementation, alone)[0][1, 0], out[1, token])
        states, conv_inputs = run_fold(implementation, one, one_block, [1, 1, 1])
        for table, folded in zip(
            (states, conv_inputs), run_fold(implementation, case, block, [token + 1] * 3), strict=True
        ):
            np.testing.assert_array_equal(bits(table[LAYER]), bits(folded[LAYER]))


@pytest.mark.usefixtures("native_code")
def test_natively_a_prompt_is_the_same_bits_in_chunks_and_as_blocks():
    shape = dataclasses.replace(SMALL, tokens=40, value_dim=72)
    case = make_case(shape, idx_mapping=[2, 0, 3], q_len=[40, 40, 40])
    out, ends = run_prefill("native", case)
    first = case.part(0, 23)
    first_out, first_ends = run_prefill("native", first)
    second = case.part(23, 40).after(*run_write(first, first_ends))
    second_out, block = run_block("native", second)
    np.testing.assert_array_equal(jnp.concatenate([first_out, second_out], axis=1), out)
    tables = run_fold("native", second, block, second.q_len)
    for table, whole in zip(tables, run_write(case, ends), strict=True):
        np.testing.assert_array_equal(bits(table[LAYER]), bits(whole[LAYER]))


@pytest.mark.usefixtures("native_code")
def test_natively_a_row_is_the_same_bits_alone_and_among_many():
    many = make_case(
        dataclasses.replace(SMALL, rows=19, slots=20, key_dim=32, value_dim=24),
        idx_mapping=np.random.default_rng(0).permutation(20)[:19],
        q_len=np.arange(19) % 6,
    )
    out, block = run_block("native", many)
    tables = run_fold("native", many, block, many.q_len)
    for row in (3, 5, 11):
        one = slice(row, row + 1)
        arrays = many.arrays | {name: many.arrays[name][one] for name in ("qkv", "g", "beta")}
        alone = Case(dataclasses.replace(many.shape, rows=1), many.idx_mapping[one], many.q_len[one], arrays)
        alone_out, alone_block = run_block("native", alone)
        np.testing.assert_array_equal(alone_out[0], out[row])
        slot = many.idx_mapping[row]
        for table, other in zip(tables, run_fold("native", alone, alone_block, alone.q_len), strict=True):
            np.testing.assert_array_equal(table[LAYER, slot], other[LAYER, slot])


@pytest.mark.parametrize("prompt", [False, True], ids=["a token", "a prompt"])
def test_tables_are_written_in_place(implementation, prompt):
    """In the program that read them, and with no memory that grows with the number of slots."""

    def step(states, conv_inputs, arguments):
        op = gated_delta_prefill if prompt else gated_delta_block
        results = [
            op(states=states, conv_inputs=conv_inputs, layer=layer, implementation=implementation, **arguments)
            for layer in range(LAYERS)
        ]
        outputs, kept = zip(*results, strict=True)
        # What is written does not wait for the outputs, as it does where tokens are drafted.
        if prompt:
            return outputs, write_rows(states, conv_inputs, kept, arguments["idx_mapping"])
        indices = arguments["idx_mapping"], jnp.ones_like(arguments["q_len"])
        return outputs, fold_block(states, conv_inputs, kept, *indices, implementation=implementation)

    temporary = []
    for slots in (4, 400):
        arguments = make_case(dataclasses.replace(SMALL, slots=slots), **FULL).arguments
        tables = arguments.pop("states"), arguments.pop("conv_inputs")
        memory = jax.jit(step, donate_argnums=(0, 1)).lower(*tables, arguments).compile().memory_analysis()
        assert memory.alias_size_in_bytes == sum(table.nbytes for table in tables)
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def test_gradients_of_chunks_are_those_of_the_reference():
    shape = dataclasses.replace(SMALL, rows=2, tokens=70)
    case = make_case(shape, idx_mapping=[2, 0], q_len=[70, 70])
    rng = np.random.default_rng(1)
    count = jnp.asarray([70, 51])
    slots = case.idx_mapping

    def loss(implementation, weights, qkv, g, beta, conv_weight, state, conv_inputs):
        start = RowStates(state=state, conv_inputs=conv_inputs)
        out, end = gated_delta(qkv, g, beta, conv_weight, count, start, implementation=implementation)
        return (out * weights[0]).sum() + (end.state * weights[1]).sum()

    names = ("qkv", "g", "beta", "conv_weight")
    arguments = [case.arrays[name] for name in names]
    arguments += [case.arrays["states"][LAYER, slots], case.arrays["conv_inputs"][LAYER, slots]]
    weights = [
        rng.standard_normal((2, 70, shape.value_heads, shape.value_dim)),
        rng.standard_normal((2, shape.value_heads, shape.key_dim, shape.value_dim)),
    ]
    differentiate = jax.jit(jax.grad(loss, argnums=range(2, 8)), static_argnums=0)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (weights, *arguments))
        expected = [np.asarray(gradient) for gradient in differentiate("reference", *wide)]
    assert all(gradient.dtype == np.float64 for gradient in expected)
    found = differentiate("xla", [jnp.asarray(w, jnp.float32) for w in weights], *arguments)
    for name, gradient, wanted in zip((*names, "state", "conv_inputs"), found, expected, strict=True):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(np.asarray(gradient) / scale, wanted / scale, atol=2e-5, err_msg=name)


def test_drift_over_many_tokens_stays_small(implementation):
    """4,096 tokens in float32 beside float64: chunks, and blocks of 16 folded one after the other."""
    shape = dataclasses.replace(SMALL, rows=1, tokens=4096, key_dim=32, value_dim=32)
    case = make_case(shape, idx_mapping=[2], q_len=[4096])
    expected, ends = in_float64(case)
    scale = np.abs(ends.state).max()
    _, end = run_prefill(implementation, case)
    assert np.abs(np.asarray(end.state) - ends.state).max() < 5e-6 * scale

    states, conv_inputs = case.arrays["states"], case.arrays["conv_inputs"]
    for begin in range(0, 4096, 16):
        part = case.part(begin, begin + 16).after(states, conv_inputs)
        out, block = run_block(implementation, part)
        states, conv_inputs = run_fold(implementation, part, block, [16])
    assert np.abs(np.asarray(states)[LAYER, 2] - ends.state[0]).max() < 5e-6 * scale
    np.testing.assert_allclose(out, expected[:, -16:], atol=1e-5)


def test_channels_that_fit_no_heads_are_refused():
    case = make_case(SMALL, **FULL)
    arrays = case.arrays | {"qkv": case.arrays["qkv"][..., :-1], "conv_weight": case.arrays["conv_weight"][:-1]}
    arrays["conv_inputs"] = arrays["conv_inputs"][:, :, :-1]
    with pytest.raises(TypeError, match="95 channels are not 4 heads of 8 values"):
        run_block("xla", dataclasses.replace(case, arrays=arrays))
