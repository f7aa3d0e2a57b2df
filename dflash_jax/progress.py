"""Progress on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dflash_jax.errors import visible

if TYPE_CHECKING:
    from dflash_jax.compiling import CompileWatch
    from dflash_jax.engine.output import Update

LINE_SECONDS = 10.0
"""Between two lines where there is no terminal, whatever the program is busy with."""

LONG_COMPILATION = 1.0
"""Seconds of a compilation that are worth telling."""


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints text as it is: paths, prompts and answers may have what looks like markup or emoji."""
    return Console(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)


class Bar:
    """Progress towards a total; a context in which it is shown, with compilations that take long.

    Args:
      what: what is being done, as a participle ("generating").
      total: how many there are to do; 0 where that turns out later.
      done: how many are done already.
      console: where to; stderr unless given.
      watch: a `CompileWatch` that is already watching; the bar starts its own unless given.
      each: what is counted ("answer"); a line that has nothing else to tell says that the next one is waited for.
      transient: leave nothing on the terminal.
    """

    def __init__(
        self,
        what: str,
        total: int,
        done: int = 0,
        console: Console | None = None,
        watch: CompileWatch | None = None,
        each: str = "step",
        transient: bool = False,
    ):
        self._console = console or plain_console(stderr=True)
        self._what, self._total, self._done, self._figures = visible(what), total, done, ""
        self._doing: str | None = None
        self._each = each
        self._noted = self._changed = time.monotonic()
        self._said = ""
        self._watch, self._own_watch = watch, watch is None
        self._ended = threading.Event()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            transient=transient,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(self._what, total=total, completed=done, figures="")
        self._pulse = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Bar:
        if self._own_watch:
            from dflash_jax.compiling import CompileWatch

            self._watch = CompileWatch(self.compiled).__enter__()
        self._progress.start()
        self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._pulse.join()
        self._progress.stop()
        if self._own_watch and self._watch is not None:
            self._watch.__exit__()

    def at(self, done: int, figures: str | None = None, total: int | None = None) -> None:
        """So many are done; the figures and the total stay what they were unless given."""
        before = self._state()
        self._total = self._total if total is None else total
        self._done, self._figures = done, self._figures if figures is None else figures
        self._doing = None
        if self._state() != before:
            self._changed = time.monotonic()
        self._progress.update(
            self._task, description=self._what, total=self._total, completed=done, figures=self._figures
        )
        self._tell_if_due()

    def doing(self, what: str) -> None:
        """Shows what else is being done, until the next `at`."""
        self._doing, self._changed = visible(what), time.monotonic()
        self._progress.update(self._task, description=self._doing)
        if not self._console.is_terminal:
            self._tell()

    def note(self, text: str) -> None:
        """Prints a line and keeps the bar."""
        self._noted = time.monotonic()
        self._console.print(visible(text), soft_wrap=True, markup=False, emoji=False)

    def compiled(self, program: str, seconds: float, cached: bool) -> None:
        """A program was compiled, or taken from the cache of compiled ones; says so if it took long."""
        if seconds >= LONG_COMPILATION:
            self.note(f"{program}: {'traced and loaded' if cached else 'compiled'} in {seconds:.1f} s")

    def _compiling(self) -> str | None:
        compiling = self._watch.current if self._watch is not None else None
        if compiling is None or compiling[2] < LONG_COMPILATION:
            return None
        return f"{compiling[0]} {compiling[1]}, {compiling[2]:.0f} s so far"

    def _state(self) -> str:
        counted = f"{self._done}/{self._total} done" if self._total else ""
        if self._doing is not None:
            return ": ".join(filter(None, [self._doing, counted]))
        return ": ".join(filter(None, [self._what, ", ".join(filter(None, [counted, self._figures]))]))

    def _tell(self) -> None:
        """A line about the state, or where it is the same as before, what is waited for and how long already."""
        text = self._compiling() or self._state()
        if text == self._said:
            waiting = "" if self._doing is not None else f"; waiting for the next {self._each}"
            self.note(f"{text}{waiting}, {time.monotonic() - self._changed:.0f} s so far")
            return
        self._said = text
        self.note(text)

    def _tell_if_due(self) -> None:
        if not self._console.is_terminal and time.monotonic() - self._noted > LINE_SECONDS:
            self._tell()

    def _beat(self) -> None:
        """Runs beside the work, which may be in the compiler or on the disk for minutes."""
        while not self._ended.wait(1.0):
            if not self._console.is_terminal:
                self._tell_if_due()
            elif self._watch is not None and self._watch.current is not None:
                self._progress.update(self._task, description=self._compiling() or self._state())


def shown(updates: Iterable[Update], total: int) -> Iterator[Update]:
    """Updates of requests, with a bar of how many have finished and of how many tokens came.

    Args:
      updates: of the requests.
      total: how many requests there are.
    """
    done = tokens = 0
    with Bar("generating", total, each="answer") as bar:
        begin = time.monotonic()
        for update in updates:
            tokens, done = tokens + len(update.token_ids), done + (update.completion is not None)
            bar.at(done, f"{tokens / max(time.monotonic() - begin, 1e-9):.0f} tokens/s")
            yield update
