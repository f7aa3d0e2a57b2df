"""One step of the engine: admit, prefill, run rounds, take in what came of it.

Order of the parts matters only on the host. On the device a step is at most two dispatches: the
prompts' next chunks, and the decoding slots' next rounds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.compile_cache import enable_compile_cache
from dflash_jax.engine import device, scheduler
from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.invariants import MEANING, Violation
from dflash_jax.engine.outbox import Outbox
from dflash_jax.engine.pages import check_pages_conserved, check_pages_exclusive, empty_pool
from dflash_jax.engine.request import Progress, Update
from dflash_jax.engine.scheduler import Chunk, HostState
from dflash_jax.engine.state import EngineState, Models, Rows, init_state
from dflash_jax.engine.steps import Report
from dflash_jax.errors import ConfigError, InvariantError
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models.config import check_pair

NO_LIMIT = int(np.iinfo(np.int32).max)
"""A `draft_limit` that no context reaches."""


class Core:
    """The engine's two states and the step that takes them forward.

    `state` is the whole device state and `host` the whole host state; both are immutable values that
    may be read, kept and compared at any time between steps. With `donate=False` in the config old
    device states stay readable too.
    """

    def __init__(
        self,
        models: Models,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        k: int | None = None,
        max_context: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        implementation: Implementation | None = None,
    ):
        """Makes an engine with no requests in it.

        Args:
          models: the target and, to speculate, the draft.
          config: sizes and habits.
          tokenizer: for text prompts and text output.
          k: tokens to draft in each round; the trained block_size - 1 by default.
          max_context: requests whose context grows past this many tokens go on without drafting.
          clock: seconds, for the metrics.
          implementation: of the kernels; see `kernels.dispatch`.

        Raises:
          ConfigError: target and draft do not fit each other, or the sizes do not fit the models.
        """
        enable_compile_cache()
        self.models = models
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.k = 0
        if models.draft_config is not None:
            check_pair(models.target_config, models.draft_config)
            self.k = k if k is not None else models.draft_config.block_size - 1
        elif k is not None:
            raise ConfigError(f"draft.k is {k}, but there is no draft to propose tokens")
        self._check_sizes()
        self.models = device.prepare(models, implementation)
        self.draft_limit = max_context if max_context is not None else NO_LIMIT
        self.implementation: Implementation | None = implementation
        self.state: EngineState = self._empty_state()
        self.host = HostState((), (), empty_pool(self.config.pool_pages, self.config.page_size), self.config.max_slots)
        self._clock = clock
        self._next_id = 0
        self._outbox = Outbox(tokenizer)

    def _check_sizes(self) -> None:
        longest, known = self.config.max_model_len, self.models.target_config.max_position
        if known and longest > known:
            raise ConfigError(
                f"engine.max_model_len is {longest}, but the target was made for at most {known} tokens "
                "(max_position_embeddings)"
            )
        if self.k >= longest:
            raise ConfigError(f"draft.k is {self.k}; it must be below engine.max_model_len {longest}")

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight."""
        return bool(self.host.waiting or self.host.running)

    def step(self) -> tuple[Update, ...]:
        """Admits, prefills, runs rounds; returns what each request got.

        Whatever this raises, no request is lost: those in flight start again from the tokens they
        have, and what was already produced comes with the next step.

        Raises:
          InvariantError: an invariant is violated and the engine is strict.
        """
        try:
            self._step()
        except BaseException:
            self._start_over()
            raise
        return self._outbox.take()

    def _step(self) -> None:
        self._admit()
        self._reserve_pages()
        self._check_pages()
        decodes = [p.slot for p in self.host.running if p.decoding and p.slot is not None]
        chunks, width = scheduler.chunks(self.host, budget=self.config.prefill_chunk)
        rows = device.arrange(self.state.rows, decodes, [chunk.slot for chunk in chunks], self.config.max_slots)
        prefilled = self._prefill(rows, len(decodes), chunks, width) if chunks else None
        decoded = self._decode(rows, len(decodes)) if decodes else None
        self.state = self.state.replace(rows=rows)
        if prefilled is not None:
            self._absorb_prefill(chunks, *prefilled)
        if decoded is not None:
            self._absorb_rounds(*decoded)
        self._publish()

    # The parts of a step.

    def _check_pages(self) -> None:
        """Before anything is written: no page is lost, none that is written is anybody else's."""
        pool, running = self.host.pool, self.host.running
        check_pages_conserved(pool, (p.pages for p in running))
        check_pages_exclusive(pool, {p.request.id: p.pages[p.computed // pool.page_size :] for p in running})

    def _speculates(self, progress: Progress) -> bool:
        return self.k > 0 and progress.fallback is None

    def _running(self, slot: int) -> Progress | None:
        return next((p for p in self.host.running if p.slot == slot), None)

    def _admit(self) -> None:
        self.host, admitted = scheduler.admit(self.host, prefix_cache=self.config.prefix_cache)
        if not admitted:
            return
        rows, slots = device.condense(self.state.rows), self.state.slots
        for progress in admitted:
            entry = device.slot_entry(progress, self.config.slot_pages, self.draft_limit, self._speculates(progress))
            slots = device.open_slot(slots, progress.slot, entry)
            live = int(np.sum(np.asarray(rows.idx_mapping) >= 0))
            rows = device.resize(rows, scheduler.bucket(live + 1, 1, self.config.max_slots))
            rows = device.assign(rows, live, progress.slot)
        self.state = self.state.replace(rows=rows, slots=slots)

    def _reserve_pages(self) -> None:
        """Pages for whatever the next rounds may commit; the newest requests make room if there are none."""
        before = {p.slot: p.pages for p in self.host.running}
        self.host, preempted = scheduler.reserve(self.host, self.config.rounds_per_step * (1 + self.k))
        for progress in preempted:
            self._leave_row(progress)
        changed = [p for p in self.host.running if p.pages != before[p.slot]]
        if changed:
            table = np.array(self.state.slots.block_table)
            for progress in changed:
                table[progress.slot, : len(progress.pages)] = progress.pages
            self.state = self.state.replace(slots=self.state.slots.replace(block_table=jnp.asarray(table)))

    def _prefill(self, rows: Rows, first_row: int, chunks: tuple[Chunk, ...], width: int) -> tuple[np.ndarray, Report]:
        part = device.part(rows, first_row, len(chunks), scheduler.bucket(len(chunks), 1, self.config.max_slots))
        mapping = np.array(part.idx_mapping)
        run = device.prefill_program(donate=self.config.donate)
        self.state, report = run(
            self.models,
            self.state.replace(rows=part),
            *device.prefill_batch(mapping, chunks, width),
            implementation=self.implementation,
        )
        return mapping, report

    def _decode(self, rows: Rows, count: int) -> tuple[np.ndarray, Report]:
        part = device.part(rows, 0, count, scheduler.bucket(count, 1, self.config.max_slots))
        mapping = np.array(part.idx_mapping)
        drafts = self.k if any(p.decoding and self._speculates(p) for p in self.host.running) else 0
        run = device.decode_program(donate=self.config.donate)
        self.state, report = run(
            self.models,
            self.state.replace(rows=part),
            drafts=drafts,
            rounds=self.config.rounds_per_step,
            implementation=self.implementation,
        )
        return mapping, report

    def _absorb_prefill(self, chunks: tuple[Chunk, ...], mapping: np.ndarray, report: Report) -> None:
        report, now = jax.device_get(report), self._clock()
        row_of = {int(slot): row for row, slot in enumerate(mapping)}
        for chunk in chunks:
            row, progress = row_of[chunk.slot], self._running(chunk.slot)
            assert progress is not None
            if report.violation[row]:
                self._fail(progress, Violation(int(report.violation[row])))
                continue
            progress = dataclasses.replace(progress, computed=progress.computed + len(chunk.tokens))
            self.host = scheduler.replace_running(self.host, progress)
            if report.position[row] != progress.computed:
                self._fail(progress, Violation.position_monotone)
                continue
            tokens = np.asarray(report.tokens)[row, : report.produced[row]]
            self._emit(progress, tokens, bool(report.finished[row]), bool(report.stopped[row]), now)

    def _absorb_rounds(self, mapping: np.ndarray, report: Report) -> None:
        report, now = jax.device_get(report), self._clock()
        for done in range(report.produced.shape[0]):
            for row, slot in enumerate(mapping):
                progress = self._running(int(slot))
                produced, violation = int(report.produced[done, row]), int(report.violation[done, row])
                if progress is None or not (produced or violation):
                    continue
                if violation:
                    self._fail(progress, Violation(violation))
                    continue
                block = tuple(int(token) for token in report.drafts[done, row, : report.drafted[done, row]])
                progress = dataclasses.replace(
                    progress,
                    computed=progress.computed + produced,
                    produced_per_round=(*progress.produced_per_round, produced),
                    drafted_blocks=(*progress.drafted_blocks, block),
                )
                if self._speculates(progress) and not block:
                    reason = f"its context of {progress.computed} tokens is past draft.max_context {self.draft_limit}"
                    progress = dataclasses.replace(progress, fallback=reason)
                    self.host = dataclasses.replace(self.host, fallbacks=self.host.fallbacks + 1)
                self.host = scheduler.replace_running(self.host, progress)
                if report.position[done, row] != progress.computed:
                    self._fail(progress, Violation.position_monotone)
                    continue
                tokens = np.asarray(report.tokens)[done, row, :produced]
                finished, stopped = bool(report.finished[done, row]), bool(report.stopped[done, row])
                self._emit(progress, tokens, finished, stopped, now)

    def _fail(self, progress: Progress, broken: Violation) -> None:
        """Ends a request by the name of the invariant it broke."""
        message = f"{broken.name} is violated: {MEANING[broken]}, and request {progress.request.id!r} broke it"
        if self.config.strict:
            raise InvariantError(message)
        self._remove(progress)
        self._outbox.close(progress, "error", message)

    def _emit(self, progress: Progress, tokens: np.ndarray, finished: bool, stopped: bool, now: float) -> None:
        """Hands new tokens out, up to a stop string, and finishes the request if it is done."""
        if not len(tokens):
            return
        taken, at_stop_string = self._outbox.push(progress.request.id, tuple(int(token) for token in tokens))
        progress = dataclasses.replace(
            progress,
            emitted=progress.emitted + taken,
            first_token=now if progress.first_token is None else progress.first_token,
            last_token=now,
        )
        self.host = scheduler.replace_running(self.host, progress)
        if finished or at_stop_string:
            self._remove(progress)
            self._outbox.close(progress, "stop" if stopped or at_stop_string else "length")

    def _start_over(self) -> None:
        """Back to a state that surely is one, after a step that did not end: every request waits, nothing is cached."""
        for progress in reversed(self.host.running):
            self.host = scheduler.preempt(self.host, progress)
        fresh = empty_pool(self.config.pool_pages, self.config.page_size)
        self.host = dataclasses.replace(self.host, running=(), pool=fresh)
        self.state = self._empty_state()

    def _empty_state(self, rows: int = 1) -> EngineState:
        return init_state(
            self.models,
            rows=rows,
            slots=self.config.max_slots,
            num_pages=self.config.pool_pages,
            page_size=self.config.page_size,
            max_model_len=self.config.max_model_len,
        )

    def _publish(self) -> None:
        if not self.config.prefix_cache:
            return
        for progress in self.host.running:
            # Pages of a request that does not draft lack the draft's half: nobody may be handed those.
            if self.k == 0 or progress.fallback is None:
                self.host = scheduler.publish_pages(self.host, progress)

    def _remove(self, progress: Progress) -> None:
        """Takes a request out, wherever it is."""
        if progress.slot is None:
            waiting = tuple(p for p in self.host.waiting if p.request.id != progress.request.id)
            self.host = dataclasses.replace(self.host, waiting=waiting)
        else:
            self.host = scheduler.remove(self.host, progress)
            self._leave_row(progress)

    def _leave_row(self, progress: Progress) -> None:
        """Empties a request's row and condenses the batch."""
        rows = device.condense(device.vacate(self.state.rows, progress.slot))
        live = len(self.host.running)
        rows = device.resize(rows, scheduler.bucket(max(live, 1), 1, self.config.max_slots))
        self.state = self.state.replace(rows=rows)
