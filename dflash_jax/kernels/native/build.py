"""The C++ of this directory: compiled for this machine's processor when first needed, and cached."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp

from dflash_jax.kernels.dispatch import log_once
from dflash_jax.private import cache_directory, exposure, private_directory, read_private
from dflash_jax.writing import replace_file

_NAMES = ("matmul.cc", "attention.cc", "gated_delta.cc", "experts.cc", "pages.cc")
_SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("cpu.h", "weights.h"))
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
_TARGETS = {
    "dflash_multiply": "DflashMultiply",
    "dflash_multiply_codes": "DflashMultiplyCodes",
    "dflash_widen": "DflashWiden",
    "dflash_attend": "DflashAttend",
    "dflash_delta_block": "DflashDeltaBlock",
    "dflash_delta_fold": "DflashDeltaFold",
    "dflash_experts": "DflashExperts",
    "dflash_write": "DflashWrite",
}
_PATIENCE = 600.0

BUILDING = "/dflash_jax/native/building"
"""Recorded when the C++ compiler begins and ends, as JAX records the phases of a compilation."""

_log = logging.getLogger(__name__)

# XLA takes functions once, so that two threads must not both load them.
_asking = threading.Lock()


class BuildError(Exception):
    """Why there is no native code."""


def available() -> bool:
    """Whether there is native code here; if there could be and is not, the log says why.

    It is for CPUs, and needs a C++ compiler (`find_compiler`). The compiled library is cached in
    `$DFLASH_JAX_CACHE/native`, or `~/.cache/dflash_jax/native`, if only this user may write there, and built again
    if it is damaged. XLA then has the functions, as FFI targets.
    """
    if jax.default_backend() != "cpu":
        return False
    with _asking:
        return _register()


@functools.cache
def _register() -> bool:
    try:
        functions = load()
    except BuildError as error:
        log_once(f"products and attention of a few rows take XLA's code, which is half as fast or less: {error}")
        return False
    for target, function in functions.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return True


def computes(*dtypes: jnp.dtype) -> bool:
    """Whether native code computes with these dtypes; its sums are float32."""
    return all(dtype in (jnp.float32, jnp.bfloat16) for dtype in dtypes)


@functools.cache
def has_bfloat16() -> bool:
    """Whether the processor multiplies matrices of bfloat16 itself, faster than of float32.

    AVX-512's products of bfloat16 (avx512_bf16) are not faster as XLA uses them.
    """
    words = set(machine().split())
    return not words.isdisjoint({"amx_bf16", "bf16"})


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: `$CXX`, or the first of c++, g++ and clang++ there is."""
    if named := os.environ.get("CXX", "").split():
        return named
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next(([path] for path in found if path), None)


def load() -> dict[str, Any]:
    """The compiled functions by their FFI targets: those that are kept, or else new ones.

    Raises:
      BuildError: there is none.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++; $CXX names another)")
    command = [*compiler, *_FLAGS, "-isystem", jax.ffi.include_dir()]
    made_of = [
        *(file.read_text() for file in _SOURCES + _HEADERS),
        shlex.join(command),
        jax.lib.__version__,
        machine(),
    ]
    name = _digest("\0".join(made_of).encode())
    directory = _directory()
    if directory is not None and (kept := _kept(directory, name)) is not None:
        return kept
    with tempfile.TemporaryDirectory() as scratch:
        if reason := exposure(Path(scratch).resolve()):
            raise BuildError(f"there is no safe place to build it: {reason}")
        made = Path(scratch) / f"{name}.so"
        begin = time.perf_counter()
        with _recorded():
            _compile([*command, *map(str, _SOURCES), "-o", str(made)])
        try:
            functions = _functions(made)
        except (OSError, AttributeError) as error:
            raise BuildError(f"what {command[0]} makes of the native code cannot be loaded: {error}") from None
        # The first start of all takes this much longer, and there is nothing else to see of it.
        _log.warning("compiled native code for this processor in %.1f s", time.perf_counter() - begin)
        # It works without being kept, and stays loaded when its file is gone.
        with contextlib.suppress(OSError):
            if directory is not None:
                content = made.read_bytes()
                replace_file(directory / f"{name}-{_digest(content)}.so", content, mode=0o600)
    return functions


def _directory() -> Path | None:
    """Where code is kept, if there is a place that only this user may write: what is loaded runs as this user."""
    try:
        return private_directory(cache_directory() / "native")
    except PermissionError as error:
        log_once(f"native code is compiled again in every process, because there is no safe place to cache it: {error}")
    except (OSError, RuntimeError):
        pass
    return None


def _kept(directory: Path, name: str) -> dict[str, Any] | None:
    """The functions of a whole file of this user. A cut one would end the process when its code is run."""
    for file in directory.glob(f"{name}-*.so"):
        try:
            if file.stem == f"{name}-{_digest(read_private(file))}":
                return _functions(file)
        except (OSError, AttributeError):
            pass
        with contextlib.suppress(OSError):
            file.unlink()
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _functions(library: Path) -> dict[str, Any]:
    code = ctypes.CDLL(str(library))
    return {target: getattr(code, symbol) for target, symbol in _TARGETS.items()}


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    begin = time.time()
    jax.monitoring.record_scalar(BUILDING, begin, fun_name="native code")
    try:
        yield
    finally:
        jax.monitoring.record_event_time_span(BUILDING, begin, time.time(), fun_name="native code")


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


@functools.cache
def machine() -> str:
    """What the code runs on: a cache may be shared between machines and containers."""
    kinds = ("model name", "flags", "Features", "CPU part")
    try:
        lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(kinds)}
    except OSError:
        lines = {platform.processor()}
    return "\n".join([platform.machine(), *platform.libc_ver(), *sorted(lines)])
