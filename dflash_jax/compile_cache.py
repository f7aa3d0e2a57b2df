"""Compiled programs kept on disk between processes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from pathlib import Path
from typing import Any

import jax

from dflash_jax.private import cache_directory, private_directory

_log = logging.getLogger(__name__)
_CHECKED = ".checked"
_DEFAULT_SECONDS = 1.0


def enable_compile_cache() -> None:
    """Keeps compiled programs under `$DFLASH_JAX_CACHE/xla`, or `~/.cache/dflash_jax/xla`, unless JAX has a cache.

    It is a setting of the whole process. Whoever configures JAX's own (`JAX_COMPILATION_CACHE_DIR`,
    `jax_compilation_cache_dir`) or turns it off (`jax_enable_compilation_cache`) is left alone. What is in the cache
    runs as this user, so a directory that others may write to is not used; nor is one that cannot be written.
    """
    if _setting("jax_compilation_cache_dir") or not _setting("jax_enable_compilation_cache"):
        return
    try:
        directory = private_directory(cache_directory() / "xla")
        _remove_damaged(directory)
    except PermissionError as error:
        _warn_once(f"compiled programs are not kept, because it would not be safe: {error}")
        return
    except (OSError, RuntimeError):
        return
    if not os.access(directory, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if _setting("jax_persistent_cache_min_compile_time_secs") == _DEFAULT_SECONDS:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@functools.cache
def _warn_once(sentence: str) -> None:
    """Every engine asks for the cache; one warning is enough."""
    _log.warning(sentence)


def own_cache() -> Path | None:
    """This package's cache directory, if JAX's cache of compiled programs is the one in it; None otherwise."""
    used = _setting("jax_compilation_cache_dir")
    if not used or not _setting("jax_enable_compilation_cache"):
        return None
    with contextlib.suppress(OSError):
        cache = cache_directory().absolute()
        if (cache / "xla").resolve(strict=True) == Path(used):
            return cache
    return None


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _remove_damaged(directory: Path) -> None:
    """Removes entries that a process died on while it wrote them. JAX neither reads nor ever replaces them.

    Raises:
      PermissionError: some entry is another user's.
    """
    stamp = directory / _CHECKED
    since = stamp.stat().st_mtime if stamp.exists() else 0.0
    found = [(entry, entry.stat(follow_symlinks=False)) for entry in os.scandir(directory)]
    for entry, info in found:
        if info.st_uid != os.getuid():
            raise PermissionError(f"{entry.path} belongs to another user (uid {info.st_uid})")
    stamp.touch(mode=0o600)
    for entry, info in found:
        if entry.name.endswith("-cache") and info.st_mtime >= since and not _is_whole(Path(entry.path)):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _is_whole(file: Path) -> bool:
    # JAX has no public name for it.
    from jax._src.compilation_cache import decompress_executable

    try:
        decompress_executable(file.read_bytes())
    except FileNotFoundError:
        return True
    except Exception:  # zlib's, zstd's
        return False
    return True
