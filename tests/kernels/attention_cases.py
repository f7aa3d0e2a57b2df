"""Cases of `block_attention`, how each implementation is run on one, and what the result is checked against."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels import mosaic
from dflash_jax.kernels.block_attention import block_attention, mosaic_gpu, native

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

# Cases run once or twice each, so it is the compiler's time that counts.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static about a case."""

    dtype: str = "float32"
    rows: int = 3
    queries: int = 5
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    slots: int = 4
    slot_pages: int = 3
    causal: bool = True
    window: int | None = None
    splits: int | None = 2


@dataclasses.dataclass
class Case:
    """Arguments of one call. What the row's queries may not depend on is NaN."""

    shape: Shape
    context_len: np.ndarray
    idx_mapping: np.ndarray
    q_len: np.ndarray
    block_table: np.ndarray
    arrays: dict[str, jax.Array]

    @property
    def live(self) -> np.ndarray:
        return (self.idx_mapping >= 0)[:, None] & (np.arange(self.shape.queries) < self.q_len[:, None])

    @property
    def arguments(self) -> dict[str, jax.Array]:
        indices = {name: getattr(self, name) for name in ("block_table", "idx_mapping", "context_len", "q_len")}
        return self.arrays | {name: jnp.asarray(value, jnp.int32) for name, value in indices.items()}


LAYERS, LAYER = 2, 1


def make_case(shape: Shape, *, context_len, idx_mapping, q_len, seed: int = 0, shared_pages: int = 0) -> Case:
    """A case with random contents.

    Slots 0 and 1 have their first `shared_pages` pages in common. Everything a correct kernel has no
    business reading is NaN: other layers, pages nobody holds, what is past a context in its last page,
    padding of the block.
    """
    rng = np.random.default_rng(seed)
    context_len, idx_mapping, q_len = (np.asarray(x) for x in (context_len, idx_mapping, q_len))
    pages = shape.slots * shape.slot_pages + 2
    table = rng.permutation(pages)[: shape.slots * shape.slot_pages].reshape(shape.slots, shape.slot_pages)
    table[1, :shared_pages] = table[0, :shared_pages]
    used = -(-context_len // shape.page_size)
    table = np.where(np.arange(shape.slot_pages) < used[:, None], table, -1)

    written = np.zeros((pages, shape.page_size), bool)
    for slot in range(shape.slots):
        for position in range(context_len[slot]):
            written[table[slot, position // shape.page_size], position % shape.page_size] = True

    def pool():
        values = rng.standard_normal((LAYERS, pages, shape.page_size, shape.kv_heads, shape.head_dim))
        values[LAYER, ~written] = np.nan
        values[1 - LAYER] = np.nan
        return values

    def block(heads):
        values = rng.standard_normal((shape.rows, shape.queries, heads, shape.head_dim))
        values[np.arange(shape.queries) >= q_len[:, None]] = np.nan
        return values

    arrays = {
        "q": block(shape.kv_heads * shape.group),
        "k_block": block(shape.kv_heads),
        "v_block": block(shape.kv_heads),
        "k_pages": pool(),
        "v_pages": pool(),
    }
    arrays = {name: jnp.asarray(value, shape.dtype) for name, value in arrays.items()}
    return Case(shape, context_len, idx_mapping, q_len, table, arrays)


def compute(implementation: str, case: Case, jit=jax.jit) -> np.ndarray:
    """The implementation's answer; that of "mosaic_gpu" from the simulator, which looks for races."""
    if implementation == "mosaic_gpu":
        with mosaic.simulated():
            return np.asarray(_jitted(implementation, case.shape, jit)(case.arguments))
    return np.asarray(_jitted(implementation, case.shape, jit)(case.arguments))


@functools.lru_cache(maxsize=16)
def _jitted(implementation: str, shape: Shape, jit):
    static = {"layer": LAYER, "causal": shape.causal, "window": shape.window, "scale": shape.head_dim**-0.5}
    if implementation == "mosaic_gpu":
        return jit(
            lambda arguments: mosaic_gpu.block_attention(**arguments, **static, splits=shape.splits),
            compiler_options=_QUICK,
        )
    if implementation == "native":
        return jit(lambda arguments: native.block_attention(**arguments, **static))
    return jit(lambda arguments: block_attention(**arguments, **static, implementation=implementation))


def check(implementation: str, case: Case, jit=jax.jit) -> None:
    """Compares with the reference in float64."""
    with jax.enable_x64(True):
        arguments = {
            name: value.astype(jnp.float64) if value.dtype != jnp.int32 else value
            for name, value in case.arguments.items()
        }
        expected = np.asarray(_jitted("reference", case.shape, jax.jit)(arguments))
    assert expected.dtype == np.float64 and np.isfinite(expected).all()
    out = compute(implementation, case, jit)
    assert out.dtype == case.arrays["q"].dtype
    out = out.astype(np.float64)
    assert not out[~case.live].any(), "padding and empty rows are zeros"
    tolerance = TOLERANCE[case.shape.dtype]
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
