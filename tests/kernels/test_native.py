"""Native code: compiled once, kept safely, and never in the way where it cannot be had."""

from __future__ import annotations

import functools
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile

import pytest

from dflash_jax.kernels import dispatch, native
from dflash_jax.kernels.native import build

needs_native = pytest.mark.usefixtures("native_code")


@pytest.fixture
def unbuilt(tmp_path, monkeypatch):
    """A place where no native code is kept; `asked_anew` then finds none."""
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    dispatch.log_once.cache_clear()
    return tmp_path


@pytest.fixture
def asked_anew():
    """`native.available` in a process that has not asked before. XLA takes functions once, so the answer must be no."""
    return functools.cache(build._register.__wrapped__)


@needs_native
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no-such-compiler does not run: .*No such file"),
        ("false", "false fails: exit 1"),
        (None, "fails: .*error"),
        ('{compiler} "-O2', "fails: "),
        ("true", "what true makes of the native code cannot be loaded"),
    ],
)
def test_without_a_compiler_the_log_says_why_once(unbuilt, monkeypatch, caplog, compiler, reason, asked_anew):
    own = " ".join(native.find_compiler())
    monkeypatch.setenv("CXX", compiler.format(compiler=own) if compiler else f"{own} -Dnamespace=nonsense")
    with caplog.at_level(logging.WARNING):
        assert not asked_anew()
        assert not asked_anew()
    [record] = caplog.records
    assert "products and attention of a few rows take XLA's code" in record.message
    assert re.search(reason, record.message)


@needs_native
def test_a_compiler_that_hangs_is_given_up(unbuilt, monkeypatch, caplog, asked_anew):
    (unbuilt / "compiler").write_text("exec sleep 60")
    monkeypatch.setenv("CXX", f"sh {unbuilt / 'compiler'}")
    monkeypatch.setattr(build, "_PATIENCE", 0.1)
    with caplog.at_level(logging.WARNING):
        assert not asked_anew()
    assert "sh does not run: " in caplog.text and "timed out" in caplog.text


@needs_native
def test_no_compiler_at_all_is_said_so(unbuilt, monkeypatch, caplog, asked_anew):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(unbuilt))
    with caplog.at_level(logging.WARNING):
        assert not asked_anew()
    assert "there is no C++ compiler" in caplog.text


@pytest.fixture
def built(unbuilt, monkeypatch, native_library):
    """Makes the code by copying it, and counts how often."""
    times = unbuilt / "times"
    script = unbuilt / "compiler"
    script.write_text(f'while [ "$1" != -o ]; do shift; done; cp {native_library} "$2"; echo once >> {times}')
    monkeypatch.setenv("CXX", f"sh {script}")
    return lambda: len(times.read_text().split())


@pytest.fixture(scope="module")
def native_library(native_code, tmp_path_factory):
    """The compiled code, as the cache has it."""
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_JAX_CACHE", str(home))
        native.load()
    [kept] = (home / "native").iterdir()
    return kept


def test_it_is_compiled_once_and_kept_where_only_its_owner_writes(unbuilt, built):
    assert native.load() and native.load()
    assert built() == 1
    assert stat.S_IMODE((unbuilt / "cache" / "native").stat().st_mode) == 0o700


def test_how_long_compiling_it_took_is_said_once(unbuilt, built, caplog):
    native.load(), native.load()
    [record] = caplog.records
    assert re.fullmatch(r"compiled native code for this processor in \d+\.\d s", record.message)


def test_a_cache_that_cannot_be_written_is_done_without(unbuilt, built):
    (unbuilt / "cache").write_text("a file where the directory should be")
    assert native.load()


def test_nobody_needs_a_home(unbuilt, built, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DFLASH_JAX_CACHE")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert native.load()


def test_what_is_kept_and_damaged_is_made_anew(unbuilt, built):
    native.load()
    [kept] = (unbuilt / "cache" / "native").iterdir()
    kept.unlink()
    kept.write_bytes(b"not code")
    assert native.load()
    assert built() == 2 and kept.stat().st_size > 100


@needs_native
def test_a_cut_library_is_never_loaded(unbuilt, built, native_library):
    """The loader maps what is there: code past the end of the file would be a bus error, which ends the process."""
    native.load()
    [kept] = (unbuilt / "cache" / "native").iterdir()
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content[: len(content) * 2 // 3])
    kept.chmod(0o600)
    program = "from dflash_jax.kernels import native; print(len(native.load()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(build._TARGETS))), done.stderr[-2000:]
    assert built() == 2 and kept.read_bytes() == content


@needs_native
@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_a_directory_that_others_may_write_is_not_loaded_from(unbuilt, built, monkeypatch, caplog, mode):
    native.load()
    directory = unbuilt / "cache" / "native"
    directory.chmod(mode)
    loaded = []
    monkeypatch.setattr(build, "_functions", lambda library: loaded.append(library) or {"one": 1})
    with caplog.at_level(logging.WARNING):
        assert native.load() and native.load()
    assert built() == 3 and all(library.parent != directory for library in loaded)
    assert caplog.text.count("native code is compiled again in every process, because there is no safe place") == 1
    assert "others may write to" in caplog.text


@needs_native
def test_a_file_that_others_may_write_or_wrote_is_not_loaded(unbuilt, built, monkeypatch):
    native.load()
    [kept] = (unbuilt / "cache" / "native").iterdir()
    loaded = []
    whole = build._functions
    monkeypatch.setattr(build, "_functions", lambda library: loaded.append(library) or whole(library))
    kept.chmod(0o660)
    native.load()
    assert built() == 2 and kept not in loaded
    if os.getuid() == 0:
        os.chown(kept, 12345, 12345)
        native.load()
        assert built() == 3 and kept not in loaded
    native.load()
    assert kept in loaded


@needs_native
def test_code_is_not_built_where_others_may_exchange_it(unbuilt, built, monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    with pytest.raises(native.BuildError, match="there is no safe place to build it: others may write to"):
        native.load()


def test_another_machine_or_compiler_has_code_of_its_own(unbuilt, built, monkeypatch):
    native.load()
    monkeypatch.setattr(build, "machine", lambda: "another")
    native.load()
    monkeypatch.setenv("CXX", os.environ["CXX"] + " -g")
    native.load()
    assert built() == len(list((unbuilt / "cache" / "native").iterdir())) == 3
