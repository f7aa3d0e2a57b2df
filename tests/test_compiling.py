"""Time spent on the compiler is told, exactly, and is in no other figure."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.compiling import CompileWatch

SLOW = 0.3


def program():
    """A program of its own each time, which takes a known time to trace."""

    @jax.jit
    def traced_slowly(x):
        time.sleep(SLOW)
        return jnp.tanh(x @ x)

    return traced_slowly


def test_the_clock_stands_still_while_something_compiles_and_runs_otherwise():
    x, run = jnp.ones((4, 4)), program()
    with CompileWatch() as watch:
        wall, begin = time.perf_counter(), watch.clock()
        run(x).block_until_ready()
        compiling, wall = watch.clock() - begin, time.perf_counter() - wall
        assert compiling < wall - SLOW
        assert watch.seconds == pytest.approx(wall - compiling, abs=1e-3) and watch.seconds >= SLOW
        seconds = watch.seconds
        run(x).block_until_ready()
        time.sleep(0.05)
        assert watch.seconds == seconds and watch.clock() - begin >= 0.05


def test_what_compiles_within_something_else_counts_once():
    @jax.jit
    def inner(x):
        time.sleep(1.5)
        return x + 1

    @jax.jit
    def outer(x):
        # Run while the outer one is traced, so traced and compiled within it.
        with jax.ensure_compile_time_eval():
            inner(jnp.ones(3))
        return x * 2

    x = jnp.ones(3)
    with CompileWatch() as watch:
        wall = time.perf_counter()
        outer(x).block_until_ready()
        # Counted twice it would be three seconds and more.
        assert 1.5 <= watch.seconds <= time.perf_counter() - wall
        assert watch.seconds < 3


def test_each_program_is_told_by_name_with_all_its_seconds():
    told = []
    x, run = jnp.ones((3, 3)), program()
    with CompileWatch(lambda *facts: told.append(facts)) as watch:
        run(x).block_until_ready()
    [seconds] = [seconds for name, seconds, _ in told if name == "traced_slowly"]
    assert seconds >= SLOW and watch.programs == len(told)


def test_a_program_out_of_the_cache_is_told_from_a_compiled_one(tmp_path):
    x = jnp.ones((5, 5))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    from jax.experimental.compilation_cache import compilation_cache

    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        compilation_cache.reset_cache()
        counts = []
        for _ in range(2):
            with CompileWatch() as watch:
                program()(x).block_until_ready()
            counts.append((watch.programs, watch.cached))
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        compilation_cache.reset_cache()
    assert counts == [(1, 0), (1, 1)]


def test_another_thread_sees_what_is_going_on_and_its_own_compilations_do_not_count():
    x, run, seen = jnp.ones((6, 6)), program(), []
    with CompileWatch() as watch:

        def look():
            time.sleep(SLOW / 2)
            seen.append(watch.current)
            program()(jnp.ones((7, 7)))

        beside = threading.Thread(target=look)
        beside.start()
        run(x).block_until_ready()
        alone = watch.seconds
        beside.join()
        assert watch.seconds == alone and watch.current is None
    [(phase, name, seconds)] = seen
    assert (phase, name) == ("tracing", "traced_slowly") and 0 < seconds < 10


def test_a_program_that_cannot_be_traced_leaves_nothing_open():
    def broken(x):
        raise ValueError

    with CompileWatch() as watch:
        with pytest.raises(ValueError):
            jax.jit(broken)(jnp.ones(2))
        assert watch.current is None
        seconds = watch.seconds
        time.sleep(0.02)
        assert watch.seconds == seconds


def test_a_watch_that_is_over_sees_nothing_more():
    with CompileWatch() as watch:
        pass
    program()(jnp.ones((8, 8)))
    assert (watch.programs, watch.seconds) == (0, 0.0)


def test_cpp_that_is_compiled_is_told_while_it_is_and_counts_as_no_program(monkeypatch, tmp_path):
    from dflash_jax.kernels.native import build

    seen = []

    def compile_(command):
        seen.append(watch.current)
        raise build.BuildError("no")

    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_compile", compile_)
    with CompileWatch() as watch, pytest.raises(build.BuildError):
        build.load()
    [(phase, what, _)] = seen
    assert (phase, what) == ("compiling", "native code") and watch.current is None
    assert watch.programs == 0 and watch.seconds > 0
