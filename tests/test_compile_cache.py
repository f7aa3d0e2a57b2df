"""Compiled programs are kept for the next process, whole, and only where nobody else may write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import jax
from tests.pairs import SAMPLING, engine, prompts
engine("recall-dflash2").generate(prompts("recall-dflash2")[:1], {**SAMPLING, "max_tokens": 4})
print(jax.config.jax_compilation_cache_dir)
"""
ENABLE = """
import jax
import jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
{first}
from dflash_jax.compile_cache import enable_compile_cache
enable_compile_cache()
print(jax.config.jax_compilation_cache_dir)
jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))))
"""


def run(program: str, cache: Path, **environment: str) -> subprocess.CompletedProcess:
    """A process with a cache of its own; what JAX is configured with here does not reach it."""
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**inherited, "DFLASH_JAX_CACHE": str(cache), "DFLASH_JAX_TYPECHECK": "0", **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def entries(cache: Path) -> list[Path]:
    return sorted(file for file in (cache / "xla").iterdir() if file.name.endswith("-cache"))


def enable(cache: Path, first: str = "", **environment: str) -> subprocess.CompletedProcess:
    return run(ENABLE.format(first=first), cache, **environment)


def test_an_engine_in_python_keeps_its_programs(tmp_path):
    assert run(RUN, tmp_path).stdout.strip() == str(tmp_path / "xla")
    assert len(entries(tmp_path)) > 3


def test_a_cache_that_jax_has_is_left_alone(tmp_path):
    own = tmp_path / "own"
    assert enable(tmp_path, JAX_COMPILATION_CACHE_DIR=str(own)).stdout.strip() == str(own)
    update = f"jax.config.update('jax_compilation_cache_dir', '{own}')"
    assert enable(tmp_path, update).stdout.strip() == str(own)
    off = "jax.config.update('jax_enable_compilation_cache', False)"
    assert enable(tmp_path, off).stdout.strip() == "None"
    assert not (tmp_path / "xla").exists()


def test_it_is_enabled_after_something_was_compiled_too(tmp_path):
    enable(tmp_path, "jax.block_until_ready(jax.jit(lambda x: x + 1)(1))")
    assert entries(tmp_path)


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b""])
def test_a_cut_entry_is_made_anew(tmp_path, damage):
    enable(tmp_path)
    before = {file: file.read_bytes() for file in entries(tmp_path)}
    for file, content in before.items():
        file.write_bytes(damage(content))
    assert "Error reading" not in enable(tmp_path).stderr
    assert set(entries(tmp_path)) == set(before)
    assert all(len(file.read_bytes()) > len(content) // 2 for file, content in before.items())


def test_a_directory_that_others_may_write_is_not_used(tmp_path):
    (tmp_path / "xla").mkdir()
    (tmp_path / "xla").chmod(0o1777)
    done = enable(tmp_path, "from dflash_jax import compile_cache; compile_cache.enable_compile_cache()")
    assert done.stdout.strip() == "None" and not entries(tmp_path)
    # However many engines ask for it.
    assert done.stderr.count("compiled programs are not kept, because it would not be safe: others may write to") == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_an_entry_of_another_user_is_not_read(tmp_path):
    enable(tmp_path)
    os.chown(entries(tmp_path)[0], 12345, 12345)
    done = enable(tmp_path)
    assert done.stdout.strip() == "None" and "belongs to another user (uid 12345)" in done.stderr


def test_a_directory_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert enable(tmp_path / "file").stdout.strip() == "None"
