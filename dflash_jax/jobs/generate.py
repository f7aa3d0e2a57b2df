"""The batch generation job: read, run, write, resume."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from dflash_jax.acceptance import total_acceptance
from dflash_jax.compiling import CompileWatch
from dflash_jax.engine import Completion, Engine, samples_of
from dflash_jax.errors import ConfigError, DflashError, InvariantError, RequestError, cut
from dflash_jax.jobs import summary
from dflash_jax.jobs.checkpoint import JobSnapshot
from dflash_jax.jobs.compare import check_lossless, compare_plain
from dflash_jax.jobs.config import JobConfig
from dflash_jax.jobs.console import JobConsole
from dflash_jax.jobs.disk_map import DiskMap
from dflash_jax.jobs.formats import open_input, open_output
from dflash_jax.jobs.formats.base import Reader, Results
from dflash_jax.jobs.in_flight import InFlight
from dflash_jax.jobs.reader import BadLine, Item, read_items
from dflash_jax.jobs.results import answer, refusal
from dflash_jax.jobs.resume import Resumption
from dflash_jax.signals import Stop
from dflash_jax.streams import STDIN

_AHEAD = 2
"""Requests handed to the engine, in multiples of its slots: enough that no slot waits for a line to be read."""

_COMPARISON = 0.1
"""What the comparison with plain decoding may take, over what the answers took."""


def run_job(
    config: JobConfig,
    *,
    overwrite: bool = False,
    stop: Stop | None = None,
    console: JobConsole | None = None,
    load: Callable[..., Engine] = Engine.from_config,
) -> dict[str, Any]:
    """Runs what is missing of a job, and returns its summary, which is also written beside the output.

    Args:
      config: the job.
      overwrite: forget the results of earlier runs.
      stop: ends the job after the current step when it becomes true; what is unfinished is left for a rerun.
      console: shows how it goes.
      load: makes the engine of a setup and a clock, once there is something to run.

    Raises:
      ConfigError, CheckpointError: it cannot be run; no answer was written.
      InvariantError: the engine is strict and an invariant is violated; all results written so far stay.
    """
    # An idle Stop is false, so `or` would not do.
    stop = Stop() if stop is None else stop
    console = console or JobConsole()
    _check_paths(config)
    with contextlib.ExitStack() as stack, CompileWatch(console.compiled) as watch:
        with console.reading(config.input.path):
            reader = stack.enter_context(open_input(config.input, cancelled=lambda: bool(stop)))
            total = reader.count()
        with open_output(config.output, reader) as output:
            earlier = summary.read_summary(config.output.path) if output.answers and not overwrite else {}
            summary.check_identity(config.output.path, earlier, config.identity())
            job = _Job(config, reader, total, output, earlier, stop, console, watch, load)
            try:
                if overwrite:
                    job.start_anew()
                return job.run()
            except BaseException as error:
                job.end(error)
                raise


def _check_paths(config: JobConfig) -> None:
    source, sink = Path(config.input.path), Path(config.output.path)
    # What cannot be looked at is refused with its reason where it is opened.
    with contextlib.suppress(OSError):
        if config.input.path != STDIN and os.path.samefile(source, sink):
            raise ConfigError(
                f"input.path and output.path are the same file, {sink}; the answers need one of their own"
            )


class _Job:
    def __init__(
        self,
        config: JobConfig,
        reader: Reader,
        lines: int,
        output: Results,
        earlier: Mapping[str, Any],
        stop: Stop,
        console: JobConsole,
        watch: CompileWatch,
        load: Callable[..., Engine],
    ):
        self._earlier = earlier
        self._config, self._reader, self._output = config, reader, output
        self._stop, self._console, self._watch = stop, console, watch
        self._load, self._lines = load, lines
        self._engine: Engine | None = None
        self._snapshot = JobSnapshot(config.output.path, config.identity(), config.output.checkpoint_every)
        self._resumption: Resumption | None = None
        self._in_flight = InFlight()
        self._refused = DiskMap()
        self._sample: list[Item] = []
        self._begin = watch.clock()
        self._requests = self._tokens = 0
        self._seconds = 0.0

    def start_anew(self) -> None:
        """Forgets the results of earlier runs, but not before it is clear that the job can run."""
        self._loaded()
        self.forget_snapshot()
        self._output.clear()

    def forget_snapshot(self) -> None:
        """Removes the snapshot, so that unfinished requests start over when the job is run again."""
        self._snapshot.remove()

    def run(self) -> dict[str, Any]:
        """Runs what is missing and returns the summary."""
        config, output = self._config, self._output
        comparison = None
        with self._console.progress(self._lines, self._watch):
            try:
                self._generate()
            finally:
                self._seconds = self._watch.clock() - self._begin
            if not self._stop:
                output.keep_refusals(self._refused)
                self._snapshot.remove()
            elif self._engine is not None and self._engine.has_work:
                self._snapshot.take(self._engine)
            compared = self._earlier.get("compare_plain") and not self._requests
            if config.report.compare_plain and not self._stop and self._sample and not compared:
                comparison = self._compare()
        found = self.save("stopped" if self._stop else "finished", comparison)
        if comparison is not None:
            check_lossless(comparison, config.engine.dtype)
        return found

    def end(self, error: BaseException) -> None:
        """Leaves a summary that says why the job could not continue, if anything can still be written.

        Raises:
          DflashError: in the error's place, where that would say nothing to a user.
        """
        if isinstance(error, InvariantError):
            # Whatever broke it may be in the snapshot already.
            self.forget_snapshot()
        said: BaseException = error
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            said = DflashError(
                "there is not enough memory for this job; give it a smaller engine.num_pages, "
                "engine.max_slots or engine.prefill_chunk, or engine.dtype bfloat16"
            )
        with contextlib.suppress(Exception):
            if isinstance(error, KeyboardInterrupt):
                self.save("stopped", reason="interrupted from the keyboard")
            else:
                # What is no Exception, such as a panic in Rust, ends the job as well.
                reason = str(said) if isinstance(said, DflashError) else f"{type(said).__name__}: {said}"
                self.save("failed", reason=cut(reason, 2000))
        if said is not error:
            raise said from error

    def _compare(self) -> dict[str, Any]:
        self._console.doing("comparing with plain decoding")
        return compare_plain(
            self._loaded(),
            self._sample,
            max_tokens=self._config.report.compare_tokens,
            clock=self._watch.clock,
            seconds=_COMPARISON * self._seconds,
            most_seconds=self._seconds,
            acceptance=total_acceptance(result.get("metrics") or {} for result in self._output.results()),
        )

    def save(self, status: str, comparison: dict[str, Any] | None = None, reason: str | None = None) -> dict[str, Any]:
        """Writes the summary as of now, and returns it."""
        runs = list(self._earlier.get("runs", ()))
        if self._requests:
            run = {
                "requests": self._requests,
                "output_tokens": self._tokens,
                "seconds": round(self._seconds, 3),
                "tokens_per_s": round(self._tokens / self._seconds, 3) if self._seconds else None,
                "compilation": self._watch.figures(),
                "engine": self._loaded().counters(),
                "device": jax.devices()[0].device_kind,
                "versions": summary.versions(),
            }
            runs.append(run)
        found = {
            "status": status,
            "reason": reason,
            "output": self._config.output.path,
            **summary.figures(self._output.results()),
            "compare_plain": comparison or self._earlier.get("compare_plain"),
            "runs": runs,
            "settings": self._config.identity(),
            "config": self._config.model_dump(mode="json"),
        }
        summary.write_summary(self._config.output.path, found)
        return found

    def _generate(self) -> None:
        items = read_items(self._reader, self._config.defaults, settings=self._config.input)
        more = True
        while not self._stop:
            while more and len(self._in_flight) < _AHEAD * self._config.engine.max_slots:
                item = next(items, None)
                if item is None:
                    more = False
                elif self._output.has(item.id):
                    self._keep_for_comparison(item)
                    self._console.skip()
                elif isinstance(item, Item):
                    self._submit(item)
                else:
                    self._refuse(item, item.error)
                if self._stop:
                    return
            if self._resumption is not None:
                self._resumption.drop_unclaimed()
            if not self._in_flight:
                return
            engine = self._loaded()
            for update in engine.step():
                self._tokens += len(update.token_ids)
                self._console.tokens(len(update.token_ids))
                whole = None if update.completion is None else self._in_flight.finish(update.completion)
                if whole is not None:
                    self._finish(*whole)
            # After this step's results are written: a request in neither place would have to start over.
            if self._snapshot.due and engine.has_work:
                self._snapshot.take(engine)

    def _loaded(self) -> Engine:
        if self._engine is None:
            self._console.doing(f"loading {self._config.target.path}")
            begin = time.perf_counter()
            self._engine = self._load(self._config.setup, clock=self._watch.clock)
            self._console.loaded(self._engine, time.perf_counter() - begin)
            if self._config.engine.warmup is None:
                self._warm_up(self._engine)
            self.save("running")
            self._begin = self._watch.clock()
        return self._engine

    def _warm_up(self, engine: Engine) -> None:
        """Compiles what the job will need, in threads and outside every figure."""
        report, left = self._config.report, max(1, self._lines - self._output.answers)
        self._console.doing("preparing programs")
        before, begin = self._watch.programs, time.perf_counter()
        left *= self._config.defaults.n
        plain = min(report.compare_requests, left) if report.compare_plain else 0
        engine.warmup(requests=left, plain=plain, sampling=self._config.defaults)
        self._console.prepared(self._watch.programs - before, time.perf_counter() - begin)

    def _submit(self, item: Item) -> None:
        engine = self._loaded()
        if self._resumption is None:
            self._resumption = self._resume(engine)
        try:
            missing = self._resumption.claim(item)
            tokens = engine.tokenize(item.prompt) if missing else ()
            for name, sampling in missing:
                engine.add_request(tokens, sampling, request_id=name)
        except RequestError as error:
            self._refuse(item, str(error))
        except (DflashError, MemoryError):
            raise
        except Exception as error:
            # A chat template or a tokenizer may raise anything; that is about this line and no other.
            what = f"{type(error).__name__}: {error}"
            self._refuse(item, f"the prompt cannot be used ({cut(what)})")
        else:
            self._in_flight.add(item)
            self._keep_for_comparison(item)

    def _resume(self, engine: Engine) -> Resumption:
        """Continues from the snapshot of a run that was ended, with those of its requests that are still wanted."""
        unusable = self._snapshot.restore(engine)
        if unusable is not None:
            self._console.note(f"the snapshot {self._snapshot.directory} is not used: {unusable}")
        found = Resumption(engine)
        # The others finished after the snapshot was taken.
        wanted = sum(not self._output.has(request_id) for request_id in found.unclaimed)
        if wanted:
            self._console.note(f"going on with {wanted} requests from {self._snapshot.directory}")
        self._snapshot.begin()
        return found

    def _finish(self, item: Item, completion: Completion) -> None:
        result = answer(item.id, completion, trace=self._config.output.trace)
        if item.request is not None:
            result["request"] = dict(item.request)
        self._output.write(result)
        self._requests += 1
        self._console.finished(item, result)

    def _refuse(self, item: Item | BadLine, error: str) -> None:
        result = refusal(item.id, item.line, error, trace=self._config.output.trace, row=item.row)
        self._refused[str(item.id)] = None
        self._output.write(result)
        self._console.refused(result)

    def _keep_for_comparison(self, item: object) -> None:
        if isinstance(item, Item) and len(self._sample) < self._config.report.compare_requests:
            first = samples_of("", item.sampling)[0][1]
            self._sample.append(dataclasses.replace(item, sampling=first))
