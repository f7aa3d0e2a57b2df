"""`native.cc` from JAX: compiled for the processor at hand when it is first asked for, and kept."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.files import cache_directory, replace_file
from dflash_jax.kernels.choice import log_once

_SOURCE = Path(__file__).with_name("native.cc")
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
_TARGET = "dflash_multiply"
_PATIENCE = 120.0  # seconds for the compiler


class BuildError(Exception):
    """Why there is no native code."""


def multiply(x: Float[Array, "rows inputs"], matrix: Float[Array, "outputs width"]) -> Float[Array, "rows outputs"]:
    """x @ matrix.T in float32; each row's result is the same bits alone and in company.

    Only where `available`, and for the dtypes it `multiplies`.

    Raises:
      TypeError: rows of different length.
    """
    if x.shape[1] != matrix.shape[1]:
        raise TypeError(f"rows of {x.shape[1]} values cannot be multiplied by a matrix with rows of {matrix.shape[1]}")
    shape = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, shape, vmap_method="sequential")(x.astype(jnp.float32), matrix)


def multiplies(*dtypes: jnp.dtype) -> bool:
    """Whether factors of these dtypes have the product's sums, which are float32."""
    return all(dtype in (jnp.float32, jnp.bfloat16) for dtype in dtypes)


@functools.cache
def available() -> bool:
    """Whether `multiply` works here; if it could and does not, the log says why.

    It is for CPUs, and takes a C++ compiler (`find_compiler`). What that makes is kept in
    `$DFLASH_JAX_CACHE/native`, or `~/.cache/dflash_jax/native`, and made anew if it cannot be loaded.
    """
    if jax.default_backend() != "cpu":
        return False
    try:
        function = load()
    except BuildError as error:
        log_once(f"products of a few rows take XLA's code, which is about half as fast: {error}")
        return False
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(function), platform="cpu")
    return True


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: `$CXX`, or the first of c++, g++ and clang++ there is."""
    if named := os.environ.get("CXX", "").split():
        return named
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next(([path] for path in found if path), None)


def load() -> Any:
    """The compiled function: the one that is kept, or else a new one.

    Raises:
      BuildError: there is none.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++; $CXX names another)")
    command = [*compiler, *_FLAGS, "-isystem", jax.ffi.include_dir()]
    made_of = [_SOURCE.read_text(), shlex.join(command), jax.lib.__version__, _machine()]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16] + ".so"
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        return _function(_kept(name))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / name
        _compile([*command, str(_SOURCE), "-o", str(made)])
        try:
            function = _function(made)
        except (OSError, AttributeError) as error:
            raise BuildError(f"what {command[0]} makes of {_SOURCE.name} cannot be loaded: {error}") from None
        # It works without being kept, and stays loaded when its file is gone.
        with contextlib.suppress(OSError, RuntimeError):
            _kept(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(_kept(name), made.read_bytes())
    return function


def _kept(name: str) -> Path:
    return cache_directory() / "native" / name


def _function(library: Path) -> Any:
    return ctypes.CDLL(str(library)).DflashMultiply


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise BuildError(f"{command[0]} fails: {next((line for line in lines if 'error' in line), lines[-1])}")


def _machine() -> str:
    """What the code runs on: a cache may be shared between machines and containers."""
    kinds = ("model name", "flags", "Features", "CPU part")
    try:
        lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(kinds)}
    except OSError:
        lines = {platform.processor()}
    return "\n".join([platform.machine(), *platform.libc_ver(), *sorted(lines)])
