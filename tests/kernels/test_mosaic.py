"""The simulator's own gates: a race is an error even if a clean kernel follows."""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels import mosaic


def handed_over(wait: bool):
    """A kernel that reads what a copy brings to shared memory, after waiting for it or not."""

    def body(x, out, buffer, loaded):
        plgpu.copy_gmem_to_smem(x, buffer, loaded)
        if wait:
            plgpu.barrier_wait(loaded)
        out[...] = buffer[...]
        if not wait:
            plgpu.barrier_wait(loaded)

    scratch = [plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), scratch_types=scratch)


def test_a_race_is_an_error_also_when_a_clean_kernel_follows():
    x = jnp.arange(128, dtype=jnp.float32)
    with mosaic.simulated():
        np.testing.assert_array_equal(handed_over(wait=True)(x), x)
    with pytest.raises(mosaic.RaceError), mosaic.simulated():
        handed_over(wait=False)(x)
        handed_over(wait=True)(x)
    with mosaic.simulated():
        handed_over(wait=True)(x)


def test_simulated_programs_are_not_mistaken_for_compiled_ones():
    x = jnp.arange(128, dtype=jnp.float32)
    jitted = jax.jit(handed_over(wait=True))
    with mosaic.simulated():
        jax.block_until_ready(jitted(x))
    assert not mosaic.simulating()
    exported = jax.export.export(jitted, platforms=["cuda"])(x)
    assert "mosaic_gpu" in exported.mlir_module()
