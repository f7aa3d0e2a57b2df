"""What the compiler is doing and how long it took: shown to the user, and kept out of timings."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax.monitoring

from dflash_jax.kernels.native.build import BUILDING
from dflash_jax.programs import LOADING, MADE, PREPARING

_COMPILING = "/jax/core/compile/backend_compile_duration"

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    _COMPILING: "compiling",
    BUILDING: "compiling",
    LOADING: "loading",
    PREPARING: "preparing",
}
"""The parts of a compilation, as each is reported when it begins and ends: by JAX, of programs kept whole, of C++."""

_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompileWatch:
    """Watches the compilations of the thread that makes it, from `__enter__` to `__exit__`.

    JAX says when it begins and when it ends to trace, lower or compile a program, or to take a compiled one from its
    cache; `programs` says when it loads one that was kept whole, or waits for several that are made in other threads.
    The seconds are the time between; nested phases count once.

    Attributes:
      seconds: spent on compilations that have ended.
      programs: how many programs were compiled or taken from a cache.
      cached: how many of them were taken from a cache.
    """

    def __init__(self, on_program: Callable[[str, float, bool], None] = lambda name, seconds, cached: None):
        """Makes a watch that has not begun.

        Args:
          on_program: is told each program's name, the seconds since it began to be traced or compiled, and
            whether it came from the cache.
        """
        self.seconds = 0.0
        self.programs = self.cached = 0
        self._on_program = on_program
        self._thread = threading.get_ident()
        # What has begun and not ended: event, program, and when.
        self._open: list[tuple[str, str, float]] = []
        # Seconds of programs that are traced and not compiled yet.
        self._traced: dict[str, float] = {}
        self._hit = False

    def clock(self) -> float:
        """Seconds on a clock that stands still while this thread compiles."""
        return time.perf_counter() - self.seconds

    @property
    def current(self) -> tuple[str, str, float] | None:
        """The current compilation: phase, program, and seconds so far. May be asked from another thread."""
        outermost = self._open[:1]
        if not outermost:
            return None
        event, program, begin = outermost[0]
        return _PHASES[event], program, time.perf_counter() - begin

    def figures(self) -> dict[str, float | int]:
        """`seconds`, `programs` and `cached` as plain values."""
        return {"seconds": round(self.seconds, 3), "programs": self.programs, "cached": self.cached}

    def __enter__(self) -> CompileWatch:
        jax.monitoring.register_scalar_listener(self._begins)
        jax.monitoring.register_event_time_span_listener(self._ends)
        jax.monitoring.register_event_listener(self._happens)
        return self

    def __exit__(self, *exception: object) -> None:
        # Somebody may have cleared all listeners meanwhile, which JAX answers with an assertion.
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_scalar_listener(self._begins)
            jax.monitoring.unregister_event_time_span_listener(self._ends)
            jax.monitoring.unregister_event_listener(self._happens)

    def _begins(self, event: str, value: Any, **facts: Any) -> None:
        if event in _PHASES and threading.get_ident() == self._thread:
            # Traced, a program is called `f`, and compiled `jit(f)`.
            program = str(facts.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
            self._open.append((event, program, time.perf_counter()))

    def _ends(self, event: str, start_time: float, end_time: float, **facts: Any) -> None:
        if threading.get_ident() != self._thread or event not in _PHASES or not self._open:
            return
        _, program, begin = self._open.pop()
        seconds = time.perf_counter() - begin
        if not self._open:
            self.seconds += seconds
        if event == _COMPILING:
            hit, self._hit = self._hit, False
            self._made(program, seconds + self._traced.pop(program, 0.0), hit)
        elif not self._open and _PHASES[event] in ("tracing", "lowering"):
            self._traced[program] = self._traced.get(program, 0.0) + seconds

    def _happens(self, event: str, **facts: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if event == _CACHE_HIT:
            self._hit = True
        elif event == MADE:
            self._made(str(facts["fun_name"]), facts["milliseconds"] / 1e3, bool(facts["cached"]))

    def _made(self, program: str, seconds: float, cached: bool) -> None:
        self.programs += 1
        self.cached += cached
        self._on_program(program, seconds, cached)
