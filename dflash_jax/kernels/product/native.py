"""`native.cc` from JAX: compiled for the processor at hand when it is first asked for, and kept."""

from __future__ import annotations

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

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.files import cache_directory, replace_file
from dflash_jax.kernels.choice import log_once

_SOURCE = Path(__file__).with_name("native.cc")
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
_TARGET = "dflash_multiply"


class BuildError(Exception):
    """Why there is no native code."""


def multiply(x: Float[Array, "rows inputs"], matrix: Float[Array, "outputs inputs"]) -> Float[Array, "rows outputs"]:
    """x @ matrix.T in float32, of a matrix in float32 or bfloat16; each row's result is the same alone or in company.

    Only where `available`.
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, shape, vmap_method="sequential")(x.astype(jnp.float32), matrix)


@functools.cache
def available() -> bool:
    """Whether `multiply` works here; if it could and does not, the log says why.

    It is for CPUs, and takes a C++ compiler (`find_compiler`). What that makes is kept in
    `$DFLASH_JAX_CACHE/native`, or `~/.cache/dflash_jax/native`.
    """
    if jax.default_backend() != "cpu":
        return False
    try:
        code = ctypes.cdll.LoadLibrary(str(library()))
    except (BuildError, OSError) as error:
        log_once(f"products of a few rows take XLA's code, which is about half as fast: {error}")
        return False
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(code.DflashMultiply), platform="cpu")
    return True


def library() -> Path:
    """The compiled file, made unless it is there.

    Raises:
      BuildError: it cannot be made.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++; $CXX names another)")
    command = [*compiler, *_FLAGS, "-isystem", jax.ffi.include_dir()]
    made_of = [_SOURCE.read_text(), shlex.join(command), jax.lib.__version__, _processor()]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16] + ".so"
    kept = cache_directory() / "native" / name
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / name
        try:
            done = subprocess.run(
                [*command, str(_SOURCE), "-o", str(made)], capture_output=True, text=True, timeout=300, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{command[0]} does not run ({error})") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
            raise BuildError(f"{command[0]} does not compile {_SOURCE.name}: {first}")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept, made.read_bytes())
        except OSError:
            # Not kept, then: what is loaded stays loaded when its file is gone.
            kept = Path(tempfile.mkdtemp()) / name
            shutil.copy(made, kept)
    return kept


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: `$CXX`, or the first of c++, g++ and clang++ there is."""
    if named := shlex.split(os.environ.get("CXX", "")):
        return named
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next(([path] for path in found if path), None)


def _processor() -> str:
    """What code for this machine's processor depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
