"""Cases of the gated delta rule, how each implementation is run on one, and what the result is checked against."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels import mosaic
from dflash_jax.kernels.gated_delta import (
    Ingredients,
    RowStates,
    fold_block,
    gated_delta_block,
    gated_delta_prefill,
    write_rows,
)

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
LAYERS, LAYER = 2, 1

# Bits are compared as they are computed in use, which the tests' setup otherwise does without.
_OPTIONS = {"xla": {"xla_backend_optimization_level": 3}}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static about a case."""

    dtype: str = "float32"
    rows: int = 3
    tokens: int = 5
    key_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 8
    width: int = 4
    slots: int = 4

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.group

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass
class Case:
    """Arguments of one call. What no row may depend on is NaN."""

    shape: Shape
    idx_mapping: np.ndarray
    q_len: np.ndarray
    arrays: dict[str, jax.Array] = dataclasses.field(repr=False)

    @property
    def count(self) -> np.ndarray:
        return np.where(self.idx_mapping >= 0, self.q_len, 0)

    @property
    def live(self) -> np.ndarray:
        return np.arange(self.shape.tokens) < self.count[:, None]

    @property
    def arguments(self) -> dict[str, jax.Array]:
        return self.arrays | {name: jnp.asarray(getattr(self, name), jnp.int32) for name in ("idx_mapping", "q_len")}

    def part(self, begin: int, end: int) -> Case:
        """The same states with only the tokens from `begin` to before `end`."""
        arrays = self.arrays | {name: self.arrays[name][:, begin:end] for name in ("qkv", "g", "beta")}
        shape = dataclasses.replace(self.shape, tokens=end - begin)
        return Case(shape, self.idx_mapping, np.clip(self.q_len - begin, 0, end - begin), arrays)

    def after(self, states, conv_inputs) -> Case:
        """The same tokens with other states."""
        return dataclasses.replace(self, arrays=self.arrays | {"states": states, "conv_inputs": conv_inputs})


def make_case(shape: Shape, *, idx_mapping, q_len, seed: int = 0) -> Case:
    """A case with random contents; slots of no row, other layers and padding are NaN."""
    rng = np.random.default_rng(seed)
    idx_mapping, q_len = np.asarray(idx_mapping), np.asarray(q_len)
    padding = np.arange(shape.tokens) >= q_len[:, None]

    def tokens(*dimensions):
        values = rng.standard_normal((shape.rows, shape.tokens, *dimensions))
        values[padding] = np.nan
        return values

    def table(*dimensions):
        values = rng.standard_normal((LAYERS, shape.slots, *dimensions))
        values[1 - LAYER] = np.nan
        values[:, ~np.isin(np.arange(shape.slots), idx_mapping)] = np.nan
        return values

    # Heads that forget at once, slowly, and not at all.
    forget = np.linspace(-4, 1.5, shape.value_heads)
    arrays = {
        "qkv": jnp.asarray(tokens(shape.channels), shape.dtype),
        "g": jnp.asarray(-np.exp(tokens(shape.value_heads) + forget), jnp.float32),
        "beta": jnp.asarray(1 / (1 + np.exp(-2 * tokens(shape.value_heads))), jnp.float32),
        "conv_weight": jnp.asarray(rng.standard_normal((shape.channels, shape.width)) / 2, shape.dtype),
        "states": jnp.asarray(table(shape.value_heads, shape.key_dim, shape.value_dim), jnp.float32),
        "conv_inputs": jnp.asarray(table(shape.channels, shape.width - 1), shape.dtype),
    }
    return Case(shape, idx_mapping, q_len, arrays)


def layers_of(tree) -> list:
    """What a layer gave, as of every layer: nothing finite is put in the others."""
    return [tree if n == LAYER else jax.tree.map(lambda x: x * jnp.nan, tree) for n in range(LAYERS)]


def run_block(implementation: str, case: Case) -> tuple[jax.Array, Ingredients]:
    with _mode(implementation):
        return jax.block_until_ready(_block(implementation)(case.arguments))


def run_fold(implementation: str, case: Case, block: Ingredients, accepted) -> tuple[jax.Array, jax.Array]:
    """The tables after folding, of a copy."""
    arrays = case.arguments
    with _mode(implementation):
        return jax.block_until_ready(
            _fold(implementation)(
                arrays["states"],
                arrays["conv_inputs"],
                layers_of(block),
                arrays["idx_mapping"],
                jnp.asarray(accepted, jnp.int32),
            )
        )


def run_prefill(implementation: str, case: Case) -> tuple[jax.Array, RowStates]:
    with _mode(implementation):
        return jax.block_until_ready(_prefill(implementation)(case.arguments))


def run_write(case: Case, ends: RowStates) -> tuple[jax.Array, jax.Array]:
    arrays = case.arguments
    return jax.jit(write_rows)(arrays["states"], arrays["conv_inputs"], layers_of(ends), arrays["idx_mapping"])


def in_float64(case: Case) -> tuple[np.ndarray, RowStates]:
    """Outputs and the rows' states at their end by the reference."""
    with jax.enable_x64(True):
        wide = {
            name: value if value.dtype == jnp.int32 else value.astype(jnp.float64)
            for name, value in case.arguments.items()
        }
        out, ends = _prefill("reference")(wide)
        assert out.dtype == ends.state.dtype == jnp.float64
        return np.asarray(out), jax.tree.map(np.asarray, ends)


def check_outputs(case: Case, out: jax.Array) -> None:
    """Compares with the reference in float64."""
    expected, _ = in_float64(case)
    assert np.isfinite(expected).all()
    assert out.dtype == case.arrays["qkv"].dtype
    out = np.asarray(out).astype(np.float64)
    assert not out[~case.live].any(), "padding and empty rows are zeros"
    tolerance = TOLERANCE[case.shape.dtype]
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


def check_tables(case: Case, states: jax.Array, conv_inputs: jax.Array) -> None:
    """Compares the slots of the case's rows with the reference in float64, all others with what they were."""
    _, ends = in_float64(case)
    written = np.isin(np.arange(case.shape.slots), case.idx_mapping[case.idx_mapping >= 0])
    for name, table in (("states", states), ("conv_inputs", conv_inputs)):
        before = np.asarray(case.arrays[name])
        assert table.dtype == before.dtype and table.shape == before.shape
        np.testing.assert_array_equal(bits(table[LAYER, ~written]), bits(before[LAYER, ~written]))
    live = case.idx_mapping >= 0
    slots = case.idx_mapping[live]
    np.testing.assert_allclose(np.asarray(states)[LAYER, slots], ends.state[live], rtol=2e-5, atol=2e-5)
    for row in np.flatnonzero(live):
        slot, count = case.idx_mapping[row], case.q_len[row]
        heard = np.asarray(case.arrays["qkv"][row, :count]).T
        expected = np.concatenate([case.arrays["conv_inputs"][LAYER, slot], heard], axis=1)
        np.testing.assert_array_equal(bits(conv_inputs[LAYER, slot]), bits(expected[:, count:]))


def bits(x) -> np.ndarray:
    """As integers, of which -0 and 0 are two and NaN is itself."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def _mode(implementation: str):
    return mosaic.simulated() if implementation == "mosaic_gpu" else contextlib.nullcontext()


@functools.cache
def _block(implementation: str):
    block = functools.partial(gated_delta_block, layer=LAYER, implementation=implementation)
    return jax.jit(lambda arguments: block(**arguments), compiler_options=_OPTIONS.get(implementation))


@functools.cache
def _prefill(implementation: str):
    return jax.jit(lambda arguments: gated_delta_prefill(**arguments, layer=LAYER, implementation=implementation))


@functools.cache
def _fold(implementation: str):
    return jax.jit(
        functools.partial(fold_block, implementation=implementation), compiler_options=_OPTIONS.get(implementation)
    )
