"""Operations that Pallas' Mosaic GPU compiler and its simulator on the CPU need spelt differently, in one place.

The simulator of JAX 0.10 knows neither register layouts, nor transposed operands, nor accumulators
that start from a value. Kernels therefore multiply and lay out through the functions below, which
trace to tensor core instructions when compiled and to plain operations when simulated. What only
the compiler sees is covered by lowering every kernel for CUDA in the tests.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src import config
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RaceError(AssertionError):
    """Two accesses of a simulated kernel to the same memory were not ordered."""


@contextlib.contextmanager
def simulated(detect_races: bool = True) -> Iterator[None]:
    """Runs the Pallas kernels traced inside on the CPU, by JAX's simulator of a GPU.

    Uninitialised memory reads as NaN and reads out of bounds raise. The mode is part of jit's cache
    key, so a function compiled inside is not mistaken for one compiled outside. Results must be
    waited for inside.

    Raises:
      RaceError: on leaving, if a race was seen and `detect_races` asked to look for them.
    """
    # The simulator is not public in JAX; only who asks for it should depend on where it is.
    from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    kernels: list[RaceDetectionState] = []

    # The simulator keeps only the last kernel's, so every one it makes is caught on the way.
    def remember(**fields):
        kernels.append(RaceDetectionState(**fields))
        return kernels[-1]

    setattr(gpu_callbacks, "RaceDetectionState", remember)  # noqa: B010
    try:
        with force_gpu_interpret_mode(InterpretGPUParams(detect_races=detect_races)):
            yield
            jax.effects_barrier()
    except BaseException:
        # A kernel that raised leaves the simulated memory behind, and the next one would trip over it.
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    finally:
        setattr(gpu_callbacks, "RaceDetectionState", RaceDetectionState)  # noqa: B010
    if any(kernel.races_found for kernel in kernels):
        raise RaceError("a Pallas kernel has a data race; the simulator printed where")


def simulating() -> bool:
    """Whether kernels traced now run in the simulator."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def with_layout(x: Array, layout: Any) -> Array:
    """x, whose layout in registers the compiler cannot infer: a constant or an iota."""
    return x if simulating() else plgpu.layout_cast(x, layout)


def load(ref: Any, index: Any, layout: Any) -> Array:
    """ref[index], laid out in registers as asked; from global memory, or from shared memory without transforms."""
    return ref[index] if simulating() else plgpu.load(ref, index, layout=layout, optimized=False)


def tile(columns: int, dtype: DTypeLike) -> tuple:
    """Transforms of a shared memory matrix that tensor cores read and TMA writes."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def scores(pairs: Sequence[tuple], shape: tuple[int, int]) -> Float[Array, "rows columns"]:
    """Sum of a @ b.T over pairs of shared memory matrices, in float32."""
    if simulating():
        return functools.reduce(operator.add, (_dot(a[...], b[...], 1) for a, b in pairs))

    def multiply(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, plgpu.transpose_ref(b, (1, 0)))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def accumulate(total: Float[Array, "rows columns"], pairs: Sequence[tuple]) -> Float[Array, "rows columns"]:
    """total + the sum of a @ b over pairs of a matrix in registers and one in shared memory."""
    if simulating():
        return functools.reduce(operator.add, (_dot(a, b[...], 0) for a, b in pairs), total)

    def multiply(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)

    return pl.run_state(multiply)(plgpu.ACC.init(total))


def products(count: int, step: Callable[..., None], shapes: Sequence[tuple[int, int]]) -> tuple[Array, ...]:
    """Float32 sums of products of shared memory matrices, one sum for each shape.

    Args:
      count: steps.
      step: is given the number of a step and a function `multiply(which, a, b, transposed)`, which adds
        a @ b, or a @ b.T, to the sum `which`. Products run on while the next step begins; who overwrites
        their operands waits with `plgpu.wgmma_wait`.
      shapes: of the sums.
    """
    if simulating():

        def simulated_step(index, sums):
            sums = list(sums)

            def multiply(which, a, b, transposed):
                sums[which] = sums[which] + _dot(a[...], b[...], 1 if transposed else 0)

            step(index, multiply)
            return tuple(sums)

        return jax.lax.fori_loop(0, count, simulated_step, tuple(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def accumulated(*accumulators):
        def compiled_step(index, carry):
            def multiply(which, a, b, transposed):
                plgpu.wgmma(accumulators[which], a, plgpu.transpose_ref(b, (1, 0)) if transposed else b)

            step(index, multiply)
            return carry

        jax.lax.fori_loop(0, count, compiled_step, 0)
        return tuple(accumulator[...] for accumulator in accumulators)

    return pl.run_scoped(accumulated, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def terms(x: Float[Array, "rows columns"], count: int) -> list[Array]:
    """bfloat16 numbers that add up to x, in a kernel: 8 bits each, three of them the 24 of a float32."""
    parts: list[Array] = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def as_terms(x: Float[Array, "rows columns"], count: int) -> Float[Array, "terms rows columns"]:
    """The same outside of a kernel, stacked."""
    if count == 1:
        return x[None]
    parts = []
    for _ in range(count):
        # Not a cast there and back: XLA may take that for the identity.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack(parts)


def _dot(a: Array, b: Array, contracted: int) -> Array:
    dimensions = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), dimensions)
