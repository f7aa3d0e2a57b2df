"""What the engine asks of XLA on a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.engine.device import compiler_options
from dflash_jax.programs import Program


def test_programs_for_gpus_do_not_copy_matrices_into_one_to_multiply_by_them_at_once(monkeypatch):
    """`benchmarks/gpu_compile.py` shows that none is copied."""
    assert compiler_options() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler_options() == {"xla_gpu_dot_merger_threshold_mb": 0}


def test_a_program_is_compiled_with_its_options():
    def double(x):
        return 2 * x

    assert Program(double, compiler_options={"xla_gpu_dot_merger_threshold_mb": 0})(jnp.ones(2)).sum() == 4
    with pytest.raises(Exception, match="xla_no_such_option"):
        Program(double, compiler_options={"xla_no_such_option": 1})(jnp.ones(2))
