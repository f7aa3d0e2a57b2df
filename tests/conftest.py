"""Set up before the package is imported: the platform, shape checks, a compile cache, hypothesis profiles.

Environment:
  JAX_PLATFORMS: "cpu" unless set.
  DFLASH_JAX_TYPECHECK: "0" turns the checks of array shapes and dtypes at run time off.
  HYPOTHESIS_PROFILE: "ci" (few examples) unless set; "long" tries 300, "thorough" 2,000.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The models are tiny: compiling them takes far longer than running them, however slowly.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

if os.environ.get("DFLASH_JAX_TYPECHECK", "1") != "0":
    from jaxtyping import install_import_hook

    import tests.shape_checks  # noqa: F401  (the hook finds it as an attribute of `tests`)

    # Shapes are checked where functions are traced; what is compiled already runs as fast as ever.
    # The edges that take what users write are left out: they say what is wrong in words of their own.
    _PARTS = ["models", "kernels", "sampling", "training", "engine.processors"]
    _PARTS += [
        f"engine.{name}"
        for name in (
            "state",
            "steps",
            "prospects",
            "verification",
            "logprobs",
            "invariants",
            "pages",
            "inputs",
            "identity",
        )
    ]
    install_import_hook([f"dflash_jax.{name}" for name in _PARTS], "tests.shape_checks.check")

import hypothesis
import jax
import pytest

from tests.memory_maps import let_go_of_programs

# Every test process compiles the same tiny programs; only the first one has to.
_CACHE = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "dflash_jax-test-xla"))
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

hypothesis.settings.register_profile("ci", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", max_examples=300, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def native_code():
    """Native code; a machine without a compiler does without the test, one whose compiler fails does not."""
    from dflash_jax.kernels import native

    if jax.default_backend() != "cpu":
        pytest.skip("native code is for CPUs")
    if native.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    assert native.available()


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Lets go of compiled programs between modules, if need be."""
    yield
    let_go_of_programs()
