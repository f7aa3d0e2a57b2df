"""Jitted functions whose compiled programs are kept whole between processes, so that a warm start traces nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

import jax
import jax.monitoring

# JAX has no public name for the settings of a thread that shape what is traced in it.
from jax._src.config import trace_context

from dflash_jax import program_files
from dflash_jax.program_files import Call

LOADING = "/dflash_jax/program/loading"
"""Recorded when the loading of a kept program begins and ends, as JAX records the phases of a compilation."""

PREPARING = "/dflash_jax/program/preparing"
"""Recorded when `prepare` begins and ends, in the thread that calls it."""

MADE = "/dflash_jax/program/made"
"""Recorded for each program that was loaded, and for each that `prepare` has made, in the thread that asked for it."""

_Source = Literal["memory", "disk", "compiler"]

_config: Any = jax.config

_all: weakref.WeakSet[Program] = weakref.WeakSet()


class Program:
    """A function, compiled once for each form of its arguments: trees, shapes, dtypes, devices, static arguments.

    A form is looked for in this process, then among those that earlier processes kept (see `program_files`), and is
    else compiled and, if it can be, kept.
    """

    def __init__(
        self,
        function: Callable,
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        compiler_options: dict[str, Any] | None = None,
    ):
        """Makes a program; nothing is compiled yet.

        Args:
          function: of pytrees of arrays, by position, and static arguments, by name. The first argument is never
            changed, so that its form is worked out once for each object.
          static: names of the static arguments.
          donate: names of the positional arguments whose memory is used again.
          compiler_options: XLA's, as `jax.jit` takes them.
        """
        self.name = function.__name__
        self._full_name = f"{function.__module__}.{function.__qualname__}"
        self._donate = tuple(donate)
        self._jitted = jax.jit(
            function,
            static_argnames=tuple(static),
            donate_argnames=self._donate,
            compiler_options=compiler_options,
        )
        self._compiled: dict[Hashable, Callable] = {}
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()
        self._first: tuple[Callable[[], Any], Hashable] | None = None
        _all.add(self)

    def __call__(self, *args: Any, **static: Any) -> Any:
        """The function's result."""
        if _config.jax_disable_jit or _config.jax_debug_nans or _config.jax_debug_infs:
            # These look into a function while it runs.
            return self._jitted(*args, **static)
        return self._get(args, static)[0](*args)

    def make(self, *args: Any, **static: Any) -> _Source:
        """Compiles for such arguments, if need be, and runs nothing. Returns where the program came from."""
        return self._get(args, static)[1]

    def clear(self) -> None:
        """Forgets what is compiled in this process."""
        with self._lock:
            self._compiled, self._making, self._first = {}, {}, None

    def _get(self, args: tuple, static: dict[str, Any]) -> tuple[Callable, _Source]:
        form = self._form(args, static)
        found = self._compiled.get(form)
        if found is not None:
            return found, "memory"
        with self._lock:
            making = self._making.setdefault(form, threading.Lock())
        with making:
            found = self._compiled.get(form)
            if found is not None:
                return found, "memory"
            found, source = self._load_or_compile(args, static)
            self._compiled[form] = found
        return found, source

    def _form(self, args: tuple, static: dict[str, Any]) -> Hashable:
        first = self._first
        if first is None or first[0]() is not args[0]:
            first = (_reference(args[0]), _form_of(args[0]))
            self._first = first
        settings = (trace_context(), _config.jax_default_device)
        return first[1], _form_of(args[1:]), tuple(sorted(static.items())), settings

    def _load_or_compile(self, args: tuple, static: dict[str, Any]) -> tuple[Callable, _Source]:
        call = Call(self._full_name, self._donate, args, static)
        file = program_files.file_of(call)
        if file is None:
            return self._jitted.lower(*args, **static).compile(), "compiler"
        if file.exists():
            begin = time.perf_counter()
            with _recorded(LOADING, self.name):
                kept = program_files.load(file, call)
            if kept is not None:
                _record_made(self, time.perf_counter() - begin, cached=True)
                return kept, "disk"
        made = program_files.compile_whole(self._jitted.lower(*args, **static))
        program_files.keep(file, call, made)
        return made, "compiler"


def _reference(value: Any) -> Callable[[], Any]:
    """What tells whether a value is the same one, and does not keep it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


def _form_of(tree: Any) -> Hashable:
    leaves, form = jax.tree.flatten(tree)
    return form, tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)


def clear_programs() -> None:
    """Forgets all programs of this process, as `jax.clear_caches` does those of `jax.jit`."""
    for program in list(_all):
        program.clear()


@dataclasses.dataclass(frozen=True)
class Bound:
    """A program with the arguments that it is to be compiled for, or called with."""

    program: Program
    args: tuple
    static: dict[str, Any]

    def __call__(self) -> Any:
        """The program's result."""
        return self.program(*self.args, **self.static)

    def make(self) -> _Source:
        """Compiles it, if need be, and runs nothing."""
        return self.program.make(*self.args, **self.static)


def prepare(wanted: Sequence[Bound], threads: int | None = None) -> None:
    """Compiles programs, or loads those that are kept, several at once, so that they are there when they are called.

    Args:
      wanted: which.
      threads: how many at once; by default as many as there are processors, and at most 8.

    Raises:
      Exception: what compiling the first that cannot be compiled raises, once the others are done.
    """
    settings = trace_context()

    def make(one: Bound) -> tuple[_Source | None, float]:
        begin = time.perf_counter()
        # A thread does not inherit the settings of the one that waits for it.
        source = one.make() if trace_context() == settings else None
        return source, time.perf_counter() - begin

    with (
        _recorded(PREPARING, f"{len(wanted)} programs"),
        ThreadPoolExecutor(threads or min(os.cpu_count() or 1, 8)) as pool,
    ):
        made = {pool.submit(make, one): one for one in wanted}
        for each in as_completed(made):
            if each.exception() is not None:
                continue
            source, seconds = each.result()
            if source is None:
                made[each].make()
            elif source != "memory":
                _record_made(made[each].program, seconds, cached=source == "disk")
    for each in made:
        each.result()


def _record_made(program: Program, seconds: float, cached: bool) -> None:
    jax.monitoring.record_event(MADE, fun_name=program.name, milliseconds=round(1e3 * seconds), cached=int(cached))


@contextlib.contextmanager
def _recorded(event: str, name: str) -> Iterator[None]:
    begin = time.time()
    jax.monitoring.record_scalar(event, begin, fun_name=name)
    try:
        yield
    finally:
        jax.monitoring.record_event_time_span(event, begin, time.time(), fun_name=name)
