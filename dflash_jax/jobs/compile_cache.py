"""Compiled programs kept on disk between runs."""

from __future__ import annotations

import os

import jax

from dflash_jax.files import cache_directory


def enable_compile_cache() -> None:
    """Keeps compiled programs under `$DFLASH_JAX_CACHE/xla`, or `~/.cache/dflash_jax/xla`.

    A setting for the whole process, so only the command line calls it. JAX's own
    `JAX_COMPILATION_CACHE_DIR` wins; a directory that cannot be written means no cache.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    directory = cache_directory() / "xla"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(directory, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
