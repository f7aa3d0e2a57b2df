"""How far something has come, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 30.0
"""Between two lines where there is no terminal."""


class Bar:
    """Progress towards a total; a context in which it is shown.

    Args:
      what: what is going on, as a participle.
      total: how many there are to do; 0 where that turns out later.
      done: how many are done already.
      console: where to; stderr unless given.
    """

    def __init__(self, what: str, total: int, done: int = 0, console: Console | None = None):
        self._console = console or Console(stderr=True, highlight=False)
        self._what, self._total, self._done, self._figures = what, total, done, ""
        self._noted = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(what, total=total, completed=done, figures="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def at(self, done: int, figures: str | None = None, total: int | None = None) -> None:
        """So many are done; the figures and the total stay what they were unless given."""
        self._total = self._total if total is None else total
        self._done, self._figures = done, self._figures if figures is None else figures
        self._progress.update(
            self._task, description=self._what, total=self._total, completed=done, figures=escape(self._figures)
        )
        if not self._console.is_terminal and time.monotonic() - self._noted > LINE_SECONDS:
            self.note(f"{self._what}: {', '.join(filter(None, [f'{done}/{self._total} done', self._figures]))}")

    def doing(self, what: str) -> None:
        """Something else is going on, until the next `at`."""
        self._progress.update(self._task, description=what)
        if not self._console.is_terminal:
            self.note(f"{what}: {self._done}/{self._total} done")

    def note(self, text: str) -> None:
        """Says something, and goes on."""
        self._noted = time.monotonic()
        self._console.print(escape(text), soft_wrap=True)
