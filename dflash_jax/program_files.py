"""Compiled programs as files: what they are filed under, and how they are written and read.

A file is used only if everything that could make another program of the same call is as it was: this package's
sources, JAX, the device, the settings of both, the trees, shapes and dtypes of the arguments, the static arguments.
Reading one runs what is in it. So they lie in a private directory, beside JAX's own cache of compiled programs, and
are read only from files of this user.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import sys
import types
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jaxlib

# JAX has no public name for the settings of a thread.
from jax._src.config import persistent_cache_min_compile_time_secs, trace_context
from jax.experimental import serialize_executable

import dflash_jax
from dflash_jax.compile_cache import own_cache
from dflash_jax.kernels.dispatch import default, register_custom_calls
from dflash_jax.private import private_directory, read_private
from dflash_jax.writing import replace_file

_log = logging.getLogger(__name__)
_config: Any = jax.config

_PACKAGE = Path(__file__).parent
_SOURCES = (".py", ".cc", ".h")
_SUFFIX = ".program"
_MOST_FILES = 512
"""Older ones are removed: those of sources and versions that are gone."""

_NUMERICAL = {"jax", "jaxlib", "nanobind", "numpy", "ml_dtypes", "jaxtyping", "flax", "chex", "optax", "orbax", "absl"}
_TEXTUAL = {"tokenizers", "transformers", "gguf", "safetensors", "huggingface_hub", "jinja2", "grain", "matplotlib"}
_OTHERS = {"immutables", "pydantic", "pydantic_core", "typing_extensions", "rich", "typer", "click", "yaml"}
_TRUSTED = {"dflash_jax", *_NUMERICAL, *_TEXTUAL, *_OTHERS, *sys.stdlib_module_names} - {"unittest"}
"""Packages whose functions may be found in this package's modules, because their sources or dependencies say so."""

_NOT_SHAPING = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_logging", "jax_explain")
"""Beginnings of JAX's options that say nothing about what is compiled."""


class Call(NamedTuple):
    """What a program is compiled for.

    Attributes:
      name: the function.
      donate: the arguments whose memory is used again.
      args: positional arguments, pytrees of arrays.
      static: the others.
    """

    name: str
    donate: tuple[str, ...]
    args: tuple
    static: dict[str, Any]


def directory() -> Path | None:
    """Where programs are kept; None unless this package's cache of compiled programs is in use (`compile_cache`)."""
    cache = own_cache()
    if cache is None:
        return None
    try:
        return private_directory(cache / "programs")
    except (OSError, RuntimeError) as error:
        _log.debug("compiled programs are not kept whole: %s", error)
        return None


def file_of(call: Call) -> Path | None:
    """The file of a program; None if it cannot be kept, so that there is nothing to look for either."""
    place = directory()
    if place is None:
        return None
    facts = describe(call)
    if (reason := _unkeepable(call, facts)) is not None:
        _log.info("the compiled program %s is not kept: %s", call.name, reason)
        return None
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:40]
    return place / f"{call.name.rpartition('.')[2]}-{digest}{_SUFFIX}"


def describe(call: Call) -> list[str]:
    """All that determines a program, as text."""
    leaves, tree = jax.tree.flatten(call.args)
    device = _devices(call)[0]
    return [
        call.name,
        repr(call.donate),
        repr(tree),
        repr([(leaf.shape, str(leaf.dtype), bool(getattr(leaf, "weak_type", False))) for leaf in leaves]),
        repr(sorted(call.static.items())),
        *surroundings(device),
    ]


def _devices(call: Call) -> list[jax.Device]:
    """The devices of a program's arguments."""
    arrays = (leaf for leaf in jax.tree.leaves(call.args) if isinstance(leaf, jax.Array))
    return list({device for array in arrays for device in array.devices()}) or jax.local_devices()[:1]


def _unkeepable(call: Call, facts: list[str]) -> str | None:
    """Why a program cannot be kept, or None if it can."""
    devices = _devices(call)
    if len(devices) > 1 or jax.process_count() > 1:
        return "it runs on several devices"
    if _config.jax_default_device not in (None, devices[0]):
        return "another device is the default one"
    if _has_own_settings():
        return "this thread has JAX settings of its own"
    if unnamed := next((fact for fact in facts if " at 0x" in fact), None):
        # What Python tells by its address is another thing in another process.
        where = unnamed.index(" at 0x")
        return f"its arguments contain {unnamed[max(0, where - 60) : where]}, which has no name"
    if sources_changed():
        return "the package's sources were written to after this process began"
    if foreign := altered():
        return f"{foreign}, not of this package"
    return None


def surroundings(device: jax.Device) -> list[str]:
    """What all programs of a process depend on: versions, device, settings."""
    values = {name: value for name, value in jax.config.values.items() if not name.startswith(_NOT_SHAPING)}
    return [
        source_digest(),
        jax.__version__,
        jaxlib.__version__,
        sys.version,
        f"{device.platform} {device.device_kind} {device.id} of {jax.device_count()}",
        device.client.platform_version,
        *_processor(device.platform),
        repr([os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]),
        repr(sorted(values.items())),
    ]


def _has_own_settings() -> bool:
    """Whether this thread is in a context, such as `jax.default_matmul_precision`, that no new thread is in."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(trace_context).result() != trace_context()


def _processor(platform: str) -> tuple[str, ...]:
    """A program for CPUs is made of this machine's instructions and, if there is any, of native code."""
    if platform != "cpu":
        return ()
    from dflash_jax.kernels import native

    return native.machine(), f"native {native.available()}"


@functools.cache
def source_digest() -> str:
    """Of this package's sources, Python and C++."""
    found = hashlib.sha256()
    for file in sorted(file for file in _PACKAGE.rglob("*") if file.suffix in _SOURCES):
        content = file.read_bytes()
        found.update(f"{file.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return found.hexdigest()


@functools.cache
def _newest_source() -> int:
    return max(file.stat().st_mtime_ns for file in _PACKAGE.rglob("*") if file.suffix in _SOURCES)


def sources_changed() -> bool:
    """Whether the sources may be other ones than this process runs: they were written after it began."""
    return _newest_source() >= dflash_jax.IMPORTED


def altered() -> str | None:
    """What in this package's modules is somebody else's, as after a patch or a registration; None if nothing is.

    A notebook's function may be another one in the next run, and its name would not say so.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("dflash_jax.") and module is not None:
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__") and (owner := _foreign(value)) is not None:
                    return f"{name}.{attribute} is of {owner}"
    return None


_known: dict[int, Any] = {}
"""Values that were looked at, by identity."""


def _foreign(value: Any) -> str | None:
    """The module that a value is of, or something in it, if that is not to be trusted."""
    if isinstance(value, type):
        own = str(value.__module__).startswith("dflash_jax.")
        inside = [part for part in list(vars(value).values()) if isinstance(part, types.FunctionType)] if own else []
    else:
        inside = list(value.values()) if isinstance(value, dict) else []
    for part in inside:
        if not isinstance(part, dict) and (owner := _foreign(part)) is not None:
            return owner
    if id(value) in _known:
        return None
    owner = str(value.__module__ if isinstance(value, types.FunctionType | type) else type(value).__module__)
    if owner.partition(".")[0] not in _TRUSTED:
        return owner
    _known[id(value)] = value
    return None


def load(file: Path, call: Call) -> Callable | None:
    """The program in a file; None if there is none, or it cannot be used for whatever reason."""
    try:
        content = read_private(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("the compiled program %s is not used, and made anew: %s", file, error)
        return None
    try:
        digest, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != digest:
            raise ValueError("it is not whole")
        executable, in_tree, out_tree = pickle.loads(zlib.decompress(payload))
        if in_tree != jax.tree.structure((call.args, {})):
            raise ValueError("it is of other arguments")
        register_custom_calls(call.static.get("implementation") or default())
        found = serialize_executable.deserialize_and_load(
            executable, in_tree, out_tree, execution_devices=_devices(call)
        )
    except Exception as error:  # the file may hold anything, and JAX may raise anything
        _log.warning("the compiled program %s is not used, and made anew: %s", file, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return found


def keep(file: Path, call: Call, compiled: jax.stages.Compiled) -> None:
    """Writes a program; if that cannot be done, the next process compiles it again."""
    try:
        executable, in_tree, out_tree = serialize_executable.serialize(compiled)
        payload = zlib.compress(pickle.dumps((executable, in_tree, out_tree)), 1)
        replace_file(file, hashlib.sha256(payload).digest() + payload, mode=0o600)
        _remove_old(file.parent)
    except Exception as error:  # what JAX cannot serialise, and a full or read-only disk
        _log.info("the compiled program %s is not kept: %s", call.name, error)


def _remove_old(place: Path) -> None:
    files = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(place) if entry.name.endswith(_SUFFIX)]
    for _, path in sorted(files)[:-_MOST_FILES]:
        with contextlib.suppress(OSError):
            os.unlink(path)


_ALSO_THE_DEFAULT: dict[str, str | bool] = {"xla_embed_ir_in_executable": False}
"""An option that changes nothing but what JAX's own cache files a program under."""


def compile_whole(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles without JAX's own cache of compiled programs, neither reading nor writing.

    On CPUs a program that was read from that cache cannot be written again: its functions are missing when it runs.
    """
    # JAX has no public way round its cache for one program. Under this key nothing is ever written.
    with persistent_cache_min_compile_time_secs(float("inf")):
        return lowered.compile(_ALSO_THE_DEFAULT)
