"""Compiled programs are kept whole, found again only where nothing has changed, and made anew otherwise."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dflash_jax import program_files, programs
from dflash_jax.compiling import CompileWatch
from dflash_jax.program_files import Call
from dflash_jax.programs import Bound, Program

ROOT = Path(__file__).parents[1]

SERVE = """
import logging
logging.basicConfig(level="INFO", format="%(message)s")
{first}
from dflash_jax.compiling import CompileWatch
from tests.pairs import SAMPLING, engine, prompts
served = engine("recall-dflash2", donate={donate})
phases = []
with CompileWatch() as watch:
    import jax
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **facts: phases.append(event))
    [found] = served.generate(prompts("recall-dflash2")[:1], {{**SAMPLING, "max_tokens": 12}})
traced = sum(event.endswith("jaxpr_trace_duration") for event in phases)
print(list(found.token_ids), [list(map(list, found.drafted_blocks))], watch.programs, watch.cached, traced, sep=";")
"""


def run(cache: Path, first: str = "", donate: bool = True, root: Path = ROOT, **environment: str):
    """A process that serves a request: its tokens and drafts, programs, those from a cache, how many were traced."""
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    surroundings = {"DFLASH_JAX_CACHE": str(cache), "DFLASH_JAX_TYPECHECK": "0", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SERVE.format(first=first, donate=donate)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=root,
        env={**inherited, **surroundings, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, drafts, *counts = done.stdout.strip().splitlines()[-1].split(";")
    return (tokens, drafts), tuple(map(int, counts)), done.stderr


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "programs").glob("_run_*.program"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, tuple[str, str]]:
    """A cache that a process has filled, and the answer it gave."""
    cache = tmp_path_factory.mktemp("filled")
    answer, (made, cached, traced), _ = run(cache)
    assert made == len(kept(cache)) > 1 and cached == 0 and traced > 0
    return cache, answer


def test_a_warm_start_traces_nothing_and_answers_the_same(filled):
    cache, answer = filled
    found, (made, cached, traced), _ = run(cache)
    assert found == answer and cached == made == len(kept(cache)) and traced == 0
    # And kept once: JAX's own cache has none of them.
    assert not list((cache / "xla").glob("jit__run_*"))


@pytest.mark.slow
def test_two_processes_at_once_both_answer_and_leave_whole_programs(tmp_path, filled):
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run(tmp_path), range(2)))
    assert [answer for answer, _, _ in both] == [filled[1]] * 2
    _, (made, cached, traced), said = run(tmp_path)
    assert made == cached and traced == 0 and "not used" not in said


def test_sources_that_were_written_after_the_process_began_are_not_what_it_runs(filled):
    later = "import dflash_jax; dflash_jax.IMPORTED = 0"
    found, (_, cached, traced), said = run(filled[0], first=later)
    assert found == filled[1] and cached == 0 and traced > 0
    assert "sources were written to after this process began" in said


# On disk, with a small function.


class Scaled(struct.PyTreeNode):
    value: jax.Array
    by: int = struct.field(pytree_node=False, default=2)


def double(x, *, times=2):
    return jax.tree.map(lambda leaf: leaf * times, x)


class own_cache:
    """This package's cache of compiled programs at a place, in this process."""

    def __init__(self, place: Path):
        self.place = place

    def __enter__(self):
        (self.place / "xla").mkdir(mode=0o700, parents=True)
        self.place.chmod(0o700)
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("DFLASH_JAX_CACHE", str(self.place))
        # Tests have code of their own in the package: checks of shapes. And somebody may edit it while they run.
        self.patch.setattr(program_files, "altered", lambda: None)
        self.patch.setattr(program_files, "sources_changed", lambda: False)
        self.before = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", str(self.place / "xla"))

    def __exit__(self, *_):
        jax.config.update("jax_compilation_cache_dir", self.before)
        self.patch.undo()


@pytest.fixture
def cache(tmp_path):
    """A cache in which one program is kept; its file."""
    with own_cache(tmp_path):
        assert SMALL.make(np.ones(3)) == "compiler"
        [file] = (tmp_path / "programs").iterdir()
        SMALL.clear()
        yield file
        SMALL.clear()


SMALL = Program(double, static=("times",))


def remade() -> bool:
    """Whether the program is made anew, and then is found again."""
    assert SMALL(np.ones(3)).tolist() == [2, 2, 2]
    SMALL.clear()
    source = SMALL.make(np.ones(3))
    SMALL.clear()
    return source == "disk"


def test_a_kept_program_is_loaded_and_only_its_owner_may_write_it(cache):
    assert cache.stat().st_mode & 0o077 == cache.parent.stat().st_mode & 0o077 == 0
    assert SMALL.make(np.ones(3)) == "disk" and SMALL(np.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"no program at all",
        lambda content: _sealed(b"no program at all"),
        lambda content: _sealed(zlib.compress(pickle.dumps(("a", "b")))),
    ],
    ids=["cut", "empty", "a bit", "other", "sealed nonsense", "another pickle"],
)
def test_a_damaged_program_is_made_anew(cache, damage, caplog):
    before = cache.read_bytes()
    cache.write_bytes(damage(before))
    assert SMALL.make(np.ones(3)) == "compiler" and "is not used, and made anew" in caplog.text
    assert len(cache.read_bytes()) == pytest.approx(len(before), rel=0.1)
    SMALL.clear()
    assert remade()


def _sealed(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


def test_a_program_of_other_arguments_under_its_name_is_made_anew(cache, caplog):
    SMALL.make((np.ones(3),) * 2)
    [other] = {*cache.parent.iterdir()} - {cache}
    cache.write_bytes(other.read_bytes())
    assert SMALL.make(np.ones(3)) == "compiler" and "it is of other arguments" in caplog.text


def test_a_program_that_others_may_write_is_not_loaded(cache, caplog):
    cache.chmod(0o666)
    assert SMALL.make(np.ones(3)) == "compiler" and "made anew" in caplog.text
    assert cache.stat().st_mode & 0o077 == 0


def test_a_link_to_a_program_is_not_loaded(cache, tmp_path, caplog):
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    assert SMALL.make(np.ones(3)) == "compiler" and "made anew" in caplog.text
    assert not cache.is_symlink() and remade()


def test_a_directory_that_others_may_write_is_not_used(cache):
    cache.parent.chmod(0o1777)
    assert SMALL.make(np.ones(3)) == "compiler"
    assert program_files.directory() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_program_of_another_user_is_not_loaded(cache, caplog):
    os.chown(cache, 12345, 12345)
    assert SMALL.make(np.ones(3)) == "compiler" and "made anew" in caplog.text


def test_a_cache_that_jax_has_of_its_own_keeps_no_programs(cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert program_files.directory() is None and SMALL.make(np.ones(3)) == "compiler"


def test_a_disk_that_takes_nothing_is_done_without(cache, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_files, "replace_file", full)
    assert SMALL(np.ones(4)).tolist() == [2, 2, 2, 2]
    assert [*cache.parent.iterdir()] == [cache]
    # What is kept there already is used.
    assert SMALL.make(np.ones(3)) == "disk"


OWN = """
import jax
import jax.numpy as jnp
import numpy as np
from dflash_jax.compile_cache import enable_compile_cache
from dflash_jax.programs import Program
enable_compile_cache()
def wave(x):
    return jnp.sin(x) * jnp.cumsum(x, 0) @ x
{what}
"""


@pytest.mark.slow
def test_a_program_of_jax_own_cache_is_compiled_again_to_be_kept(tmp_path):
    """One that was read from there can be written and loaded, and then fails when it is run."""
    for what in (
        "jax.jit(wave)(np.ones((8, 8)))",
        "assert Program(wave).make(np.ones((8, 8))) == 'compiler'",
        "one = Program(wave); assert one.make(np.ones((8, 8))) == 'disk'; jax.block_until_ready(one(np.ones((8, 8))))",
    ):
        inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        done = subprocess.run(
            [sys.executable, "-c", OWN.format(what=what)],
            env={**inherited, "DFLASH_JAX_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (what, done.stderr[-1000:])


def test_a_changed_source_has_another_digest(tmp_path, monkeypatch):
    """A comment is enough: nobody has to tell what matters."""
    shutil.copytree(ROOT / "dflash_jax", tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(program_files, "_PACKAGE", tmp_path / "copy")
    digests = {program_files.source_digest.__wrapped__()}
    for name in ("models/layers.py", "kernels/native/matmul.cc", "kernels/native/cpu.h"):
        with (tmp_path / "copy" / name).open("a") as file:
            file.write("\n")
        digests.add(program_files.source_digest.__wrapped__())
    assert len(digests) == 4


PATCHES = [
    ("import dflash_jax.engine.steps as m; old = m._cut; m._cut = lambda *a: old(*a)", "m._cut = old"),
    (
        "from dflash_jax.models.matrix import Matrix as m; old = m.laid_out; m.laid_out = lambda *a: old(*a)",
        "m.laid_out = old",
    ),
    (
        "from dflash_jax.models import drafters as m\nclass Mine(m.DFlash2): pass\nm.register('mine', Mine())",
        "del m.protocol._DRAFTERS['mine']",
    ),
    (
        "import unittest.mock, dflash_jax.engine.steps as m; old = m.extend; m.extend = unittest.mock.MagicMock()",
        "m.extend = old",
    ),
]
"""A function, a method, a drafter, and a mock, each with what undoes it."""

LOOK = """
import importlib, pkgutil, dflash_jax
for m in pkgutil.walk_packages(dflash_jax.__path__, "dflash_jax."):
    if not m.name.endswith("__main__"):
        importlib.import_module(m.name)
from dflash_jax.program_files import altered
assert altered() is None, altered()
for patch in {patches!r}:
    changed = {{"__name__": "__main__"}}
    exec(patch[0], changed)
    assert "of " in (altered() or ""), patch[0]
    exec(patch[1], changed)
    assert altered() is None, altered()
"""


def test_patched_code_is_noticed_and_nothing_of_the_package_as_it_is():
    program = LOOK.format(patches=PATCHES)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-1000:]


def test_patched_code_is_neither_kept_nor_answered_by_what_is_kept(cache, monkeypatch):
    monkeypatch.setattr(program_files, "altered", lambda: "steps._cut is of __main__")
    assert SMALL.make(np.ones(3)) == SMALL.make(np.ones(4)) == "compiler"
    assert [*cache.parent.iterdir()] == [cache]


# What a program is filed under.


def _call(**changes) -> Call:
    call = Call("f", ("state",), (Scaled(np.ones((2, 3), np.float32)), np.zeros(4, np.int32)), {"drafts": 3})
    return call._replace(**changes)


OTHERS = {
    "function": _call(name="g"),
    "donation": _call(donate=()),
    "static argument": _call(static={"drafts": 4}),
    "static field": _call(args=(Scaled(np.ones((2, 3), np.float32), by=3), np.zeros(4, np.int32))),
    "shape": _call(args=(Scaled(np.ones((3, 2), np.float32)), np.zeros(4, np.int32))),
    "dtype": _call(args=(Scaled(np.ones((2, 3), np.float32)), np.zeros(4, np.int64))),
    "structure": _call(args=((Scaled(np.ones((2, 3), np.float32)),), np.zeros(4, np.int32))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_shapes_a_program_is_in_its_name(what, tmp_path):
    with own_cache(tmp_path):
        assert program_files.file_of(_call()) == program_files.file_of(_call())
        assert program_files.file_of(OTHERS[what]) != program_files.file_of(_call())


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
        lambda patch: patch.setattr(jax, "__version__", "99"),
        lambda patch: patch.setattr("jaxlib.__version__", "99"),
        lambda patch: patch.setattr(program_files, "source_digest", lambda: "other"),
        lambda patch: patch.setattr("dflash_jax.kernels.native.machine", lambda: "another processor"),
        lambda patch: patch.setattr("dflash_jax.kernels.native.available", lambda: False),
    ],
    ids=["XLA flags", "jax", "jaxlib", "package", "processor", "native code"],
)
def test_whatever_a_program_is_made_with_is_in_its_name(change, tmp_path, monkeypatch, native_code):
    facts = program_files.describe(_call())
    change(monkeypatch)
    assert program_files.describe(_call()) != facts


def test_a_setting_of_jax_is_in_its_name_and_one_of_this_thread_alone_keeps_it_from_being_kept(tmp_path):
    with own_cache(tmp_path):
        before = program_files.file_of(_call())
        jax.config.update("jax_default_matmul_precision", "highest")
        try:
            assert program_files.file_of(_call()) not in (None, before)
        finally:
            jax.config.update("jax_default_matmul_precision", None)
        with jax.default_matmul_precision("highest"):
            assert program_files.file_of(_call()) is None


def test_what_has_no_name_is_not_kept(tmp_path):
    with own_cache(tmp_path):
        assert program_files.file_of(_call(static={"f": object()})) is None


# In one process.


def test_a_form_is_compiled_once_and_another_for_itself():
    program = Program(double, static=("times",))
    assert program.make(np.ones(3)) == "compiler" and program.make(np.zeros(3)) == "memory"
    assert program.make(np.ones(4)) == "compiler" and program.make(np.ones(3), times=3) == "compiler"
    assert program(np.ones(3), times=3).tolist() == [3, 3, 3] and program(np.ones(3)).tolist() == [2, 2, 2]
    with jax.default_matmul_precision("highest"):
        assert program.make(np.ones(3)) == "compiler"


def test_programs_are_prepared_in_threads_and_counted_where_they_are_waited_for():
    program, seen = Program(double, static=("times",)), []
    wanted = [Bound(program, (np.ones(size),), {"times": 5}) for size in (3, 4, 5, 3)]
    with CompileWatch(lambda *made: seen.append(made)) as watch:
        begin = watch.clock()
        programs.prepare(wanted)
        assert watch.programs == len(seen) == 3 and watch.cached == 0
        assert {name for name, _, _ in seen} == {"double"}
        # All of the wait is compilation, in no figure of speed.
        assert watch.clock() - begin < 0.2 * watch.seconds + 0.01
        [wanted[0].make() for _ in range(3)]
        assert watch.programs == 3


def test_what_cannot_be_compiled_is_told_when_the_others_are_done():
    def odd(x):
        if x.shape[0] % 2:
            raise ValueError("an odd shape")
        return x

    program = Program(odd)
    with pytest.raises(ValueError, match="an odd shape"):
        programs.prepare([Bound(program, (np.ones(size),), {}) for size in (3, 4)])
    assert program.make(np.ones(4)) == "memory"


def test_settings_of_this_thread_hold_for_what_is_prepared():
    program = Program(double)
    with jax.default_matmul_precision("highest"):
        programs.prepare([Bound(program, (np.ones(3),), {})])
        assert program.make(np.ones(3)) == "memory"


def test_debugging_looks_into_a_program():
    def function(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return x + x

    seen: list[bool] = []
    with jax.disable_jit():
        Program(function)(np.ones(3))
    assert seen == [False]
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        Program(lambda x: jnp.sqrt(x))(-np.ones(3))


def test_old_programs_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(program_files, "_MOST_FILES", 2)
    program = Program(double)
    with own_cache(tmp_path):
        for size in (3, 4, 5):
            program(np.ones(size))
        files = sorted((tmp_path / "programs").iterdir(), key=lambda file: file.stat().st_mtime)
        assert len(files) == 2
        program.clear()
        assert [program.make(np.ones(size)) for size in (5, 4, 3)] == ["disk", "disk", "compiler"]
