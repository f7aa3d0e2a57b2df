"""The batch generation job: read, run, write, resume."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from dflash_jax.engine import Completion, Engine, EngineSetup
from dflash_jax.errors import ConfigError, DflashError, InvariantError, RequestError
from dflash_jax.jobs import summary
from dflash_jax.jobs.checkpoint import JobSnapshot
from dflash_jax.jobs.compare import check_lossless, compare_plain
from dflash_jax.jobs.config import JobConfig
from dflash_jax.jobs.reader import Item, count_lines, read_items
from dflash_jax.jobs.resume import Resumption
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
    load: Callable[[EngineSetup], Engine] = Engine.from_config,
) -> dict[str, Any]:
    """Runs what is missing of a job, and returns its summary, which is also written beside the output.

    Args:
      config: the job.
      overwrite: forget the rows of earlier runs.
      stop: ends the job after the current step when it becomes true; what is unfinished is left for a rerun.
      screen: shows how it goes.
      load: makes the engine, once there is something to run.

    Raises:
      ConfigError, CheckpointError: it cannot be run; no answer was written.
      InvariantError: the engine is strict and an invariant is violated; all rows written so far stay.
    """
    total = count_lines(config.input.path)
    _check_paths(config)
    with RowFile(config.output.path) as output:
        earlier = summary.read_summary(config.output.path) if output.done and not overwrite else {}
        summary.check_identity(config.output.path, earlier, config.identity())
        # An idle Stop is false, so `or` would not do.
        job = _Job(config, output, earlier, Stop() if stop is None else stop, screen or Screen(), load)
        try:
            if overwrite:
                job.start_anew()
            return job.run(total)
        except DflashError as error:
            if isinstance(error, InvariantError):
                # Whatever broke it may be in the snapshot already.
                job.forget_snapshot()
            with contextlib.suppress(DflashError):
                job.save("failed")
            raise
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DflashError(
                "the device has not enough memory for this job; give it a smaller engine.num_pages, "
                "engine.max_slots or engine.prefill_chunk, or engine.dtype bfloat16"
            ) from error


def _check_paths(config: JobConfig) -> None:
    source, sink = Path(config.input.path), Path(config.output.path)
    if sink.exists() and os.path.samefile(source, sink):
        raise ConfigError(f"input.path and output.path are the same file, {sink}; the answers need one of their own")


class _Job:
    def __init__(
        self,
        config: JobConfig,
        output: RowFile,
        earlier: Mapping[str, Any],
        stop: Stop,
        screen: Screen,
        load: Callable[[EngineSetup], Engine],
    ):
        self._earlier = earlier
        self._config, self._output, self._stop, self._screen = config, output, stop, screen
        self._load = load
        self._engine: Engine | None = None
        self._snapshot = JobSnapshot(config.output.path, config.identity(), config.output.checkpoint_every)
        self._resumption: Resumption | None = None
        self._in_flight: dict[str, Item] = {}
        self._refused: set[str] = set()
        self._sample: list[Item] = []
        self._begin = time.perf_counter()
        self._requests = self._tokens = 0
        self._seconds = 0.0

    def start_anew(self) -> None:
        """Forgets the rows of earlier runs, but not before it is clear that the job can run."""
        self._loaded()
        self.forget_snapshot()
        self._output.clear()

    def forget_snapshot(self) -> None:
        """Lets unfinished requests begin anew when the job is run again."""
        self._snapshot.remove()

    def run(self, total: int) -> dict[str, Any]:
        """Runs what is missing and returns the summary."""
        config, output = self._config, self._output
        with self._screen.progress(total):
            self._generate()
            self._seconds = time.perf_counter() - self._begin
        if not self._stop:
            output.keep_refusals(self._refused)
            self._snapshot.remove()
        elif self._engine is not None and self._engine.has_work:
            self._snapshot.take(self._engine)
        comparison = None
        compared = self._earlier.get("compare_plain") and not self._requests
        if config.report.compare_plain and not self._stop and self._sample and not compared:
            self._screen.note("comparing with plain decoding")
            comparison = compare_plain(self._loaded(), self._sample)
        found = self.save("stopped" if self._stop else "finished", comparison)
        if comparison is not None:
            check_lossless(comparison, config.engine.dtype)
        return found

    def save(self, status: str, comparison: dict[str, Any] | None = None) -> dict[str, Any]:
        """Writes the summary as of now, and returns it."""
        runs = list(self._earlier.get("runs", ()))
        if self._requests:
            run = {
                "requests": self._requests,
                "output_tokens": self._tokens,
                "seconds": round(self._seconds, 3),
                "tokens_per_s": round(self._tokens / self._seconds, 3) if self._seconds else None,
                "engine": self._loaded().counters(),
                "device": jax.devices()[0].device_kind,
                "versions": summary.versions(),
            }
            runs.append(run)
        found = {
            "status": status,
            "output": self._config.output.path,
            **summary.figures(self._output.rows()),
            "compare_plain": comparison or self._earlier.get("compare_plain"),
            "runs": runs,
            "settings": self._config.identity(),
            "config": self._config.model_dump(mode="json"),
        }
        summary.write_summary(self._config.output.path, found)
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
            if self._resumption is not None:
                self._resumption.drop_unclaimed()
            if not self._in_flight:
                return
            engine = self._loaded()
            for update in engine.step():
                self._tokens += len(update.token_ids)
                self._screen.tokens(len(update.token_ids))
                if update.completion is not None:
                    self._finish(self._in_flight.pop(update.id), update.completion)
            # After this step's rows are written: a request in neither place would have to begin anew.
            if self._snapshot.due and engine.has_work:
                self._snapshot.take(engine)

    def _loaded(self) -> Engine:
        if self._engine is None:
            self._screen.note(f"loading {self._config.target.path}")
            self._engine = self._load(self._config.setup)
            self._screen.loaded(self._engine)
            self.save("running")
            self._begin = time.perf_counter()
        return self._engine

    def _submit(self, item: Item) -> None:
        engine = self._loaded()
        if self._resumption is None:
            self._resumption = self._resume(engine)
        try:
            if not self._resumption.claim(item):
                engine.add_request(item.prompt, item.sampling, request_id=str(item.id))
        except RequestError as error:
            self._refuse(item.id, item.line, str(error))
        else:
            self._in_flight[str(item.id)] = item
            self._keep_for_comparison(item)

    def _resume(self, engine: Engine) -> Resumption:
        """Goes on from the snapshot of a run that was ended, as far as its requests are still wanted."""
        unusable = self._snapshot.restore(engine)
        if unusable is not None:
            self._screen.note(f"the snapshot {self._snapshot.directory} is not used: {unusable}")
        found = Resumption(engine)
        # The others finished after the snapshot was taken.
        wanted = sum(not self._output.has(request_id) for request_id in found.unclaimed)
        if wanted:
            self._screen.note(f"going on with {wanted} requests from {self._snapshot.directory}")
        self._snapshot.begin()
        return found

    def _finish(self, item: Item, completion: Completion) -> None:
        row = answer(item.id, completion, trace=self._config.output.trace)
        self._output.write(row)
        self._requests += 1
        self._screen.finished(item, row)

    def _refuse(self, item_id: str | int, line: int, error: str) -> None:
        row = refusal(item_id, line, error, trace=self._config.output.trace)
        self._refused.add(str(item_id))
        self._output.write(row)
        self._screen.refused(row)

    def _keep_for_comparison(self, item: object) -> None:
        if isinstance(item, Item) and len(self._sample) < self._config.report.compare_requests:
            self._sample.append(item)
