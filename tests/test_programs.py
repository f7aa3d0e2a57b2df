"""Compiled programs are kept whole, found again only where nothing has changed, and made anew otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
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


@pytest.fixture
def cache(filled, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(filled[0], tmp_path / "cache")
    return tmp_path / "cache"


def test_a_warm_start_traces_nothing_and_answers_the_same(filled):
    cache, answer = filled
    found, (made, cached, traced), _ = run(cache)
    assert found == answer and cached == made == len(kept(cache)) and traced == 0


def test_programs_are_kept_beside_the_cache_where_only_their_owner_may_write(filled):
    cache, _ = filled
    assert (cache / "programs").stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in kept(cache))
    # And once: JAX's own cache has none of them.
    assert not list((cache / "xla").glob("jit__run_*"))


def test_another_state_of_donation_is_another_program(cache, filled):
    before = kept(cache)
    found, (_, cached, _), _ = run(cache, donate=False)
    assert found == filled[1] and cached == 0 and len(kept(cache)) == 2 * len(before)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"no program at all",
    ],
    ids=["cut", "empty", "a bit", "other"],
)
def test_a_damaged_program_is_made_anew(cache, filled, damage):
    before = {file: file.read_bytes() for file in kept(cache)}
    for file, content in before.items():
        file.write_bytes(damage(content))
    found, (_, cached, _), said = run(cache)
    assert found == filled[1] and cached == 0
    assert said.count("is not used, and made anew: it is not whole") == len(before)
    assert set(kept(cache)) == set(before) and all(file.stat().st_size > 1000 for file in before)
    assert run(cache)[1][1] == len(before)


def test_a_program_of_other_arguments_under_this_name_is_made_anew(cache, filled):
    one, other = kept(cache)[0], kept(cache)[-1]
    assert one.name.split("-")[0] != other.name.split("-")[0]
    one.write_bytes(other.read_bytes())
    found, (made, cached, _), said = run(cache)
    assert found == filled[1] and cached == made - 1 and "it is of other arguments" in said


def test_a_program_that_others_may_write_or_a_link_is_not_loaded(cache, filled):
    first, second = kept(cache)[:2]
    first.chmod(0o666)
    moved = cache / "elsewhere"
    second.rename(moved)
    second.symlink_to(moved)
    found, (made, cached, _), said = run(cache)
    assert found == filled[1] and cached == made - 2
    assert said.count("is not used, and made anew") == 2
    assert run(cache)[1][1] == made


def test_a_directory_that_others_may_write_is_not_used(cache, filled):
    before = kept(cache)
    (cache / "programs").chmod(0o1777)
    found, (_, cached, traced), _ = run(cache)
    assert found == filled[1] and traced > 0 and kept(cache) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_program_of_another_user_is_not_loaded(cache, filled):
    os.chown(kept(cache)[0], 12345, 12345)
    found, (made, cached, _), said = run(cache)
    assert found == filled[1] and cached == made - 1 and "made anew" in said


def test_a_cache_that_jax_has_of_its_own_keeps_no_programs(tmp_path, filled):
    found, (_, _, traced), _ = run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert found == filled[1] and traced > 0 and not (tmp_path / "programs").exists()


def test_a_cache_that_cannot_be_written_is_read_or_done_without(tmp_path, cache, filled, monkeypatch):
    monkeypatch.setattr(program_files, "replace_file", _full)
    program = Program(double)
    with own_cache(tmp_path / "full"):
        assert program(np.ones(3))[0] == 2
    assert not list((tmp_path / "full" / "programs").iterdir())


def _full(*_, **__):
    raise OSError(28, "No space left on device")


def test_two_processes_at_once_both_answer_and_leave_whole_programs(tmp_path, filled):
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run(tmp_path), range(2)))
    assert [answer for answer, _, _ in both] == [filled[1]] * 2
    _, (made, cached, traced), said = run(tmp_path)
    assert made == cached and traced == 0 and "not used" not in said


def test_a_changed_source_finds_none_of_the_programs(tmp_path, cache, filled):
    """A comment is enough: nobody has to tell what matters."""
    for part in ("dflash_jax", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    (tmp_path / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")
    with (tmp_path / "dflash_jax" / "models" / "layers.py").open("a") as file:
        file.write("# A comment.\n")
    found, (_, cached, traced), _ = run(cache, root=tmp_path)
    assert found == filled[1] and cached == 0 and traced > 0


def test_sources_that_were_written_after_the_process_began_are_not_what_it_runs(tmp_path, filled):
    later = "import dflash_jax; dflash_jax.IMPORTED = 0"
    found, (_, cached, traced), said = run(filled[0], first=later)
    assert found == filled[1] and cached == 0 and traced > 0
    assert "sources were written to after this process began" in said


@pytest.mark.parametrize(
    "patch",
    [
        "import dflash_jax.engine.steps as m; old = m._cut; m._cut = lambda *a: old(*a)",
        "from dflash_jax.models.matrix import Matrix as m; old = m.__rmatmul__; m.__rmatmul__ = lambda *a: old(*a)",
        "from dflash_jax.models import drafters as m\nclass Mine(m.DFlash2): pass\nm.register('dflash2', Mine())",
    ],
    ids=["function", "method", "drafter"],
)
def test_patched_code_is_never_answered_by_a_kept_program(filled, patch):
    before = kept(filled[0])
    found, (_, cached, traced), said = run(filled[0], first=patch)
    assert found == filled[1] and cached == 0 and traced > 0 and kept(filled[0]) == before
    assert "not of this package" in said


def test_nothing_in_the_package_as_it_is_looks_patched(tmp_path):
    every = "import pkgutil, importlib, dflash_jax\n" + (
        "for m in pkgutil.walk_packages(dflash_jax.__path__, 'dflash_jax.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "from dflash_jax.program_files import altered; assert altered() is None, altered()"
    )
    done = subprocess.run(
        [sys.executable, "-c", every], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-1000:]


# What a program is filed under.


class Scaled(struct.PyTreeNode):
    value: jax.Array
    by: int = struct.field(pytree_node=False, default=2)


def double(x, *, times=2):
    return x * times


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


class own_cache:
    """This package's cache of compiled programs at a place, in this process."""

    def __init__(self, place: Path):
        self.place = place

    def __enter__(self):
        (self.place / "xla").mkdir(mode=0o700, parents=True)
        self.place.chmod(0o700)
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("DFLASH_JAX_CACHE", str(self.place))
        # Tests have code of their own in the package: checks of shapes.
        self.patch.setattr(program_files, "altered", lambda: None)
        self.before = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", str(self.place / "xla"))

    def __exit__(self, *_):
        jax.config.update("jax_compilation_cache_dir", self.before)
        self.patch.undo()


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
        return x / x

    seen: list[bool] = []
    with jax.disable_jit():
        Program(function)(np.ones(3))
    assert seen == [False]
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        Program(function)(np.zeros(3))


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
