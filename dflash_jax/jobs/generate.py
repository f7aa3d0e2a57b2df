"""The batch generation job: read, run, write, resume."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dflash_jax.engine import Completion, Engine
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.jobs import summary
from dflash_jax.jobs.compare import check_lossless, compare_plain
from dflash_jax.jobs.config import JobConfig
from dflash_jax.jobs.reader import Item, count_lines, read_items
from dflash_jax.jobs.rows import answer, refusal
from dflash_jax.jobs.screen import Screen
from dflash_jax.jobs.signals import Stop
from dflash_jax.jobs.writer import RowFile

_AHEAD = 2
"""Requests handed to the engine, in multiples of its slots: enough that no slot waits for a line to be read."""


def run_job(
    config: JobConfig,
    *,
    overwrite: bool = False,
    stop: Stop | None = None,
    screen: Screen | None = None,
    load: Callable[[JobConfig], Engine] = Engine.from_config,
) -> dict[str, Any]:
    """Runs what is missing of a job, and returns its summary, which is also written beside the output.

    Args:
      config: the job.
      overwrite: forget the rows of earlier runs.
      stop: ends the job after the current step when it becomes true; what is unfinished is left for a rerun.
      screen: shows how it goes.
      load: makes the engine, once there is something to run.

    Raises:
      ConfigError, CheckpointError: it cannot be run; nothing was written.
      InvariantError: the engine is strict and an invariant is violated; all rows written so far stay.
    """
    total = count_lines(config.input.path)
    _check_paths(config)
    with RowFile(config.output.path) as output:
        if overwrite:
            output.clear()
        elif output.done:
            summary.check_identity(config.output.path, config.identity())
        job = _Job(config, output, stop or Stop(), screen or Screen(), load)
        return job.run(total)


def _check_paths(config: JobConfig) -> None:
    source, sink = Path(config.input.path), Path(config.output.path)
    if sink.exists() and os.path.samefile(source, sink):
        raise ConfigError(f"input.path and output.path are the same file, {sink}; the answers need one of their own")


class _Job:
    def __init__(
        self, config: JobConfig, output: RowFile, stop: Stop, screen: Screen, load: Callable[[JobConfig], Engine]
    ):
        self._config, self._output, self._stop, self._screen = config, output, stop, screen
        self._load, self._engine = load, None  # type: Callable[[JobConfig], Engine], Engine | None
        self._in_flight: dict[str, Item] = {}
        self._refused: set[str] = set()
        self._sample: list[Item] = []
        self._begin = time.perf_counter()
        self._run = {"requests": 0, "output_tokens": 0, "seconds": 0.0, "tokens_per_s": None}

    def run(self, total: int) -> dict[str, Any]:
        config, output = self._config, self._output
        self._save("running", {})
        with self._screen.progress(total):
            self._generate()
            if self._engine is not None:
                seconds = time.perf_counter() - self._begin
                self._run["seconds"] = round(seconds, 3)
                self._run["tokens_per_s"] = round(self._run["output_tokens"] / seconds, 3)
        if not self._stop:
            output.keep_refusals(self._refused)
        rest: dict[str, Any] = {"device": jax.devices()[0].device_kind if self._engine is not None else None}
        if config.report.compare_plain and not self._stop and self._sample:
            self._screen.note("comparing with plain decoding")
            rest["compare_plain"] = compare_plain(self._loaded(), self._sample)
        found = self._save("stopped" if self._stop else "finished", rest)
        if "compare_plain" in found:
            check_lossless(found["compare_plain"], config.engine.dtype)
        return found

    def _generate(self) -> None:
        items = read_items(self._config.input.path, self._config.defaults)
        more = True
        while not self._stop:
            while more and len(self._in_flight) < _AHEAD * self._config.engine.max_slots:
                item = next(items, None)
                if item is None:
                    more = False
                elif self._output.has(item.id):
                    self._keep_for_comparison(item)
                    self._screen.skip()
                elif isinstance(item, Item):
                    self._submit(item)
                else:
                    self._refuse(item.id, item.line, item.error)
                if self._stop:
                    return
            if not self._in_flight:
                return
            for update in self._loaded().step():
                self._run["output_tokens"] += len(update.token_ids)
                self._screen.tokens(len(update.token_ids))
                if update.completion is not None:
                    self._finish(self._in_flight.pop(update.id), update.completion)

    def _loaded(self) -> Engine:
        if self._engine is None:
            self._screen.note(f"loading {self._config.target.path}")
            self._engine = self._load(self._config)
            self._screen.note(self._screen.describe(self._engine))
            self._begin = time.perf_counter()
        return self._engine

    def _submit(self, item: Item) -> None:
        engine = self._loaded()
        try:
            engine.add_request(item.prompt, item.sampling, request_id=str(item.id))
        except RequestError as error:
            self._refuse(item.id, item.line, str(error))
        else:
            self._in_flight[str(item.id)] = item
            self._keep_for_comparison(item)

    def _finish(self, item: Item, completion: Completion) -> None:
        row = answer(item.id, completion, trace=self._config.output.trace)
        self._output.write(row)
        self._run["requests"] += 1
        self._screen.finished(item, row)

    def _refuse(self, item_id: str | int, line: int, error: str) -> None:
        row = refusal(item_id, line, error, trace=self._config.output.trace)
        self._refused.add(str(item_id))
        self._output.write(row)
        self._screen.refused(row)

    def _keep_for_comparison(self, item: object) -> None:
        if isinstance(item, Item) and len(self._sample) < self._config.report.compare_requests:
            self._sample.append(item)

    def _save(self, status: str, rest: dict[str, Any]) -> dict[str, Any]:
        found = {
            "status": status,
            "output": self._config.output.path,
            **summary.figures(self._output.rows()),
            "this_run": dict(self._run),
            **rest,
            "versions": summary.versions(),
            "settings": self._config.identity(),
            "config": self._config.model_dump(mode="json"),
        }
        summary.write_summary(self._config.output.path, found)
        return found
