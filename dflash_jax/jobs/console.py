"""What a person sees of a job: progress on stderr, the outcome on stdout."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from dflash_jax.acceptance import Acceptance, total_acceptance
from dflash_jax.compiling import CompileWatch
from dflash_jax.engine import Engine
from dflash_jax.errors import visible
from dflash_jax.jobs.ledger import Result
from dflash_jax.jobs.reader import Item
from dflash_jax.jobs.summary import summary_path
from dflash_jax.jobs.summary_table import summary_table
from dflash_jax.kernels.compact import Compact, is_compact
from dflash_jax.progress import Bar, plain_console

_WINDOW_SECONDS = 10.0
_ERRORS_SHOWN = 5


class JobConsole:
    """Shows a job. Where stderr is no terminal, a line now and then takes the place of the bar."""

    def __init__(self, *, samples: int = 0, quiet: bool = False):
        """Shows nothing yet.

        Args:
          samples: how many answers `outcome` shows.
          quiet: show nothing while the job runs.
        """
        self._err = plain_console(stderr=True, quiet=quiet)
        self._samples = samples
        self._shown: list[tuple[Item, Result]] = []
        self._errors: list[str] = []
        self._failed = 0
        self._worked = False
        self._recent: deque[tuple[float, int]] = deque()
        self._acceptance, self._done = Acceptance(), 0
        self._bar: Bar | None = None

    # While it runs.

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Shows that the input is being read, if that takes long."""
        with Bar(f"reading {path}", 0, console=self._err, each="line", transient=True):
            yield

    @contextlib.contextmanager
    def progress(self, total: int, watch: CompileWatch) -> Iterator[None]:
        """Shows a progress bar over so many input lines, and what the watch sees."""
        with Bar("generating", total, console=self._err, watch=watch, each="answer") as self._bar:
            yield
        self._bar = None

    def compiled(self, program: str, seconds: float, cached: bool) -> None:
        """A program was compiled, or taken from the cache of compiled ones."""
        if self._bar is not None:
            self._bar.compiled(program, seconds, cached)

    def doing(self, what: str) -> None:
        """Shows what is being done, until the next tokens."""
        if self._bar is not None:
            self._bar.doing(what)

    def note(self, text: str) -> None:
        """Prints a line on stderr."""
        self._err.print(visible(text), soft_wrap=True)

    def loaded(self, engine: Engine, seconds: float) -> None:
        """Says what will run, and how long it took to load."""
        self.note(f"loaded in {seconds:.1f} s: {describe(engine)}")
        if self._bar is not None:
            # Loading is over: show the count again.
            self._bar.at(self._done)

    def prepared(self, programs: int, seconds: float) -> None:
        """Programs were compiled or loaded ahead."""
        if programs:
            self.note(f"prepared {programs} programs in {seconds:.1f} s")
        if self._bar is not None:
            self._bar.at(self._done)

    def skip(self) -> None:
        """An input line's answer is there already."""
        self._advance()

    def tokens(self, count: int) -> None:
        """So many tokens were produced."""
        now = time.monotonic()
        self._recent.append((now, count))
        while now - self._recent[0][0] > _WINDOW_SECONDS:
            self._recent.popleft()
        self._refresh()

    def finished(self, item: Item, result: Result) -> None:
        """A request finished."""
        self._worked = True
        self._acceptance += total_acceptance([result["metrics"]])
        if result["finish_reason"] == "error":
            self._note_error(f"{result['id']}: {result['error']}")
        elif len(self._shown) < self._samples:
            self._shown.append((item, result))
        self._advance()

    def refused(self, result: Result) -> None:
        """An input line could not be run."""
        self._worked = True
        self._note_error(result["error"])
        self._advance()

    def _note_error(self, error: str) -> None:
        self._failed += 1
        if len(self._errors) < _ERRORS_SHOWN:
            self._errors.append(error)

    def _advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.at(self._done)

    def _refresh(self) -> None:
        seconds = time.monotonic() - self._recent[0][0]
        figures = [f"{sum(count for _, count in self._recent) / seconds:.0f} tokens/s"] if seconds > 0.5 else []
        if (length := self._acceptance.mean_acceptance_length) is not None:
            figures.append(f"{length:.2f} tokens/round")
        if self._bar is not None:
            self._bar.at(self._done, ", ".join(figures))

    # At the end.

    def outcome(self, found: Mapping[str, Any]) -> None:
        """Prints some answers and the summary on stdout."""
        console = plain_console()
        for item, result in self._shown:
            console.print(_prompt_text(item), style="bold", soft_wrap=True)
            console.print(_answer_text(result) + "\n", soft_wrap=True)
        nothing = found["status"] == "finished" and not self._worked
        console.print("generate: nothing was left to do" if nothing else f"generate: {found['status']}")
        if found.get("reason"):
            console.print(visible(found["reason"]), soft_wrap=True)
        console.print(summary_table(found))
        for error in self._errors:
            console.print(f"error: {visible(error)}", style="red", soft_wrap=True)
        if self._failed > len(self._errors):
            console.print(f"... and {self._failed - len(self._errors)} more errors, in the output", soft_wrap=True)
        console.print(visible(f"answers: {found['output']}"), soft_wrap=True)
        console.print(visible(f"summary: {summary_path(found['output'])}"), soft_wrap=True)


def describe(engine: Engine) -> str:
    """One line about an engine."""
    models, config = engine.models, engine.config
    # A tied head and its embedding may be two leaves, of one array.
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(models.target, is_leaf=is_compact)}.values()
    size = sum(leaf.size for leaf in leaves)
    dtypes = dict.fromkeys([*(leaf.format for leaf in leaves if isinstance(leaf, Compact)), config.dtype])
    how = "decoding plainly"
    if models.draft_config is not None:
        how = f"drafting {engine.k} tokens a round with {models.draft_config.title}"
    return (
        f"{models.target_config.family} target of {size / 1e6:,.1f} M parameters in {', '.join(dtypes)} on "
        f"{jax.devices()[0].device_kind}, {how}; {config.max_slots} slots of {config.max_model_len} tokens"
    )


def _prompt_text(item: Item) -> str:
    if isinstance(item.prompt, str):
        return _short(item.prompt)
    parts = item.prompt["messages"] if isinstance(item.prompt, Mapping) else item.prompt
    last = parts[-1]
    return _short(str(last.get("content"))) if isinstance(last, Mapping) else _short(" ".join(map(str, parts)))


def _answer_text(result: Result) -> str:
    return _short(result["text"] if result["text"] is not None else " ".join(map(str, result["token_ids"])), 600)


def _short(text: str, limit: int = 160) -> str:
    text = visible(text.strip(), keep="\n\t")
    return text if len(text) <= limit else text[: limit - 3].rstrip() + "..."
