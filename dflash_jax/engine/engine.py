"""The engine: admit, prefill, run rounds, hand out what came of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from dflash_jax.checkpoints import Tokenizer, load_draft, load_target
from dflash_jax.engine import device, scheduler
from dflash_jax.engine.config import EngineConfig, EngineSetup, parse
from dflash_jax.engine.invariants import MEANING, Violation
from dflash_jax.engine.pages import check_pages_conserved, empty_pool
from dflash_jax.engine.request import Completion, FinishReason, Progress, Request, SamplingParams, Update, metrics_of
from dflash_jax.engine.scheduler import Chunk, HostState
from dflash_jax.engine.state import EngineState, Models, Rows, init_state
from dflash_jax.engine.steps import Report
from dflash_jax.engine.text import TextStream
from dflash_jax.errors import ConfigError, InvariantError, RequestError
from dflash_jax.kernels.block_attention import Implementation
from dflash_jax.models.config import check_pair

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages."""

_NO_LIMIT = np.iinfo(np.int32).max


class Engine:
    """Generates for many requests at once, drafting for each from its own context.

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
          implementation: see `block_attention`.

        Raises:
          ConfigError: target and draft do not fit each other.
        """
        self.models = models
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.k = 0
        if models.draft_config is not None:
            check_pair(models.target_config, models.draft_config)
            self.k = k if k is not None else models.draft_config.block_size - 1
        elif k is not None:
            raise ConfigError(f"draft.k is {k}, but there is no draft to propose tokens")
        self.draft_limit = max_context if max_context is not None else _NO_LIMIT
        self.implementation: Implementation | None = implementation
        self.state: EngineState = init_state(
            models,
            rows=1,
            slots=self.config.max_slots,
            num_pages=self.config.pool_pages,
            page_size=self.config.page_size,
            max_model_len=self.config.max_model_len,
        )
        self.host = HostState((), (), empty_pool(self.config.pool_pages, self.config.page_size), self.config.max_slots)
        self._clock = clock
        self._next_id = 0
        self._texts: dict[str, TextStream] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | EngineSetup | str | Path) -> Engine:
        """Loads the models a configuration names and makes an engine of them.

        Args:
          config: a mapping with `target`, optionally `draft`, and `engine`; or a YAML file with these.

        Raises:
          ConfigError, CheckpointError: it cannot be done; the message says why.
        """
        setup = config if isinstance(config, EngineSetup) else parse(EngineSetup, *_read(config))
        target = load_target(setup.target.path, setup.engine.dtype)
        models = Models(target.params, target.config)
        if setup.draft is None:
            return cls(models, setup.engine, tokenizer=target.tokenizer)
        draft = load_draft(setup.draft.path, setup.engine.dtype, setup.draft.mask_token_id)
        models = models.replace(draft=draft.params, draft_config=draft.config)
        return cls(
            models,
            setup.engine,
            tokenizer=target.tokenizer,
            k=setup.draft.k,
            max_context=setup.draft.max_context,
        )

    # Requests in and out.

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queues a request and returns its id.

        Args:
          prompt: text, token ids, or chat messages.
          sampling: parameters, or the ones that differ from the defaults.
          request_id: any string not in flight; made up if not given.

        Raises:
          RequestError: it can never be served; nothing was queued.
        """
        if not isinstance(sampling, SamplingParams):
            sampling = SamplingParams().override(sampling or {})
        if request_id is None:
            request_id = f"request-{self._next_id}"
            self._next_id += 1
        if any(p.request.id == request_id for p in (*self.host.waiting, *self.host.running)):
            raise RequestError(f"request id {request_id!r} is in flight already; ids must be unique")
        request = self._request(request_id, self.tokenize(prompt), sampling)
        progress = Progress(request, arrived=self._clock(), fallback=self._fallback_of(request))
        self.host = dataclasses.replace(self.host, waiting=(*self.host.waiting, progress))
        if self.tokenizer is not None:
            self._texts[request_id] = TextStream(self.tokenizer, sampling.stop)
        return request_id

    def abort(self, request_id: str) -> Completion:
        """Ends a request wherever it is, and returns what it has.

        Raises:
          RequestError: no such request is in flight.
        """
        for progress in (*self.host.waiting, *self.host.running):
            if progress.request.id == request_id:
                return self._finish(progress, "abort")
        raise RequestError(f"no request {request_id!r} is in flight, so it cannot be aborted")

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight."""
        return bool(self.host.waiting or self.host.running)

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
          RequestError: it is text or messages, and there is no tokenizer or no chat template for it.
        """
        if not isinstance(prompt, str) and all(isinstance(token, int | np.integer) for token in prompt):
            return tuple(int(token) for token in prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise RequestError("the prompt is text, but the model has no tokenizer; give token ids instead")
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        return tuple(self.tokenizer.apply_chat(prompt))  # type: ignore[arg-type]

    def step(self) -> tuple[Update, ...]:
        """Admits, prefills, runs rounds; returns what each request got.

        Raises:
          InvariantError: an invariant is violated and the engine is strict.
        """
        updates: dict[str, Update] = {}
        self._admit()
        self._reserve_pages()
        decodes = [p.slot for p in self.host.running if p.decoding and p.slot is not None]
        chunks, width = scheduler.chunks(self.host, budget=self.config.prefill_chunk)
        rows = device.arrange(self.state.rows, decodes, [chunk.slot for chunk in chunks], self.config.max_slots)
        prefilled = self._prefill(rows, len(decodes), chunks, width) if chunks else None
        decoded = self._decode(rows, len(decodes)) if decodes else None
        self.state = self.state.replace(rows=rows)
        if prefilled is not None:
            self._absorb_prefill(chunks, *prefilled, updates)
        if decoded is not None:
            self._absorb_rounds(*decoded, updates)
        self._publish()
        check_pages_conserved(self.host.pool, (p.pages for p in self.host.running))
        return tuple(updates.values())

    # Whole generations.

    def stream(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any] | None = None
    ) -> Iterator[Update]:
        """Generates for all prompts at once and yields updates as they come.

        An abandoned iteration aborts its requests.
        """
        return self._stream([self.add_request(prompt, sampling) for prompt in prompts])

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """Generates for all prompts at once; completions in the prompts' order."""
        ids = [self.add_request(prompt, sampling) for prompt in prompts]
        done = {update.id: update.completion for update in self._stream(ids) if update.completion is not None}
        return [done[request_id] for request_id in ids]

    def _stream(self, ids: Sequence[str]) -> Iterator[Update]:
        unfinished = set(ids)
        try:
            while unfinished:
                for update in self.step():
                    if update.id in unfinished:
                        if update.completion is not None:
                            unfinished.discard(update.id)
                        yield update
        finally:
            for request_id in unfinished:
                self.abort(request_id)

    # Requests.

    def _request(self, request_id: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Request:
        """Checks a request against what the engine can ever serve."""
        vocab, longest, pool = self.models.target_config.vocab_size, self.config.max_model_len, self.host.pool
        if not prompt:
            raise RequestError("the prompt is empty; it must have at least one token")
        outside = [token for token in prompt if not 0 <= token < vocab]
        if outside:
            raise RequestError(f"prompt token {outside[0]} is outside the vocabulary of {vocab} tokens")
        if len(prompt) >= longest:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, which leaves no room to answer in engine.max_model_len {longest}"
            )
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model has none; use stop_token_ids instead")
        own = () if sampling.ignore_eos else self.models.target_config.eos_token_ids
        stop_tokens = tuple(dict.fromkeys((*own, *sampling.stop_token_ids)))
        request = Request(request_id, prompt, sampling, stop_tokens, min(sampling.max_tokens, longest - len(prompt)))
        needed = scheduler.pages_for(request.longest, pool.page_size)
        if needed > pool.num_pages:
            raise RequestError(
                f"the request may grow to {request.longest} tokens, which is {needed} pages of {pool.page_size}, but "
                f"the whole pool has {pool.num_pages} (engine.num_pages)"
            )
        return request

    def _fallback_of(self, request: Request) -> str | None:
        """Why a request never drafts, if so."""
        if self.k == 0:
            return None
        if not request.sampling.speculation:
            return "the request asked for no speculation"
        if len(request.prompt) > self.draft_limit:
            return f"its prompt of {len(request.prompt)} tokens is past draft.max_context {self.draft_limit}"
        return None

    def _speculates(self, progress: Progress) -> bool:
        return self.k > 0 and progress.fallback is None

    def _running(self, slot: int) -> Progress | None:
        return next((p for p in self.host.running if p.slot == slot), None)

    # The parts of a step.

    def _admit(self) -> None:
        self.host, admitted = scheduler.admit(self.host, prefix_cache=self.config.prefix_cache)
        rows, slots = self.state.rows, self.state.slots
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
        part = device.part(rows, first_row, scheduler.bucket(len(chunks), 1, self.config.max_slots))
        mapping = np.array(part.idx_mapping)
        run = device.run_prefill_donated if self.config.donate else device.run_prefill
        self.state, report = run(
            self.models,
            self.state.replace(rows=part),
            *device.prefill_batch(mapping, chunks, width),
            implementation=self.implementation,
        )
        return mapping, report

    def _decode(self, rows: Rows, count: int) -> tuple[np.ndarray, Report]:
        part = device.part(rows, 0, scheduler.bucket(count, 1, self.config.max_slots))
        mapping = np.array(part.idx_mapping)
        run = device.run_decode_donated if self.config.donate else device.run_decode
        self.state, report = run(
            self.models,
            self.state.replace(rows=part),
            drafts=self.k if any(p.decoding and self._speculates(p) for p in self.host.running) else 0,
            rounds=self.config.rounds_per_step,
            implementation=self.implementation,
        )
        return mapping, report

    def _absorb_prefill(
        self, chunks: tuple[Chunk, ...], mapping: np.ndarray, report: Report, updates: dict[str, Update]
    ) -> None:
        report, now = jax.device_get(report), self._clock()
        row_of = {int(slot): row for row, slot in enumerate(mapping)}
        for chunk in chunks:
            row, progress = row_of[chunk.slot], self._running(chunk.slot)
            assert progress is not None
            progress = dataclasses.replace(progress, computed=progress.computed + len(chunk.tokens))
            self.host = scheduler.replace_running(self.host, progress)
            if self._holds(progress, int(report.violation[row]), int(report.position[row]), updates):
                tokens = np.asarray(report.tokens)[row, : report.produced[row]]
                self._emit(progress, tokens, bool(report.finished[row]), bool(report.stopped[row]), now, updates)

    def _absorb_rounds(self, mapping: np.ndarray, report: Report, updates: dict[str, Update]) -> None:
        report, now = jax.device_get(report), self._clock()
        for done in range(report.produced.shape[0]):
            for row, slot in enumerate(mapping):
                progress = self._running(int(slot))
                produced, violation = int(report.produced[done, row]), int(report.violation[done, row])
                if progress is None or not (produced or violation):
                    continue
                block = tuple(int(token) for token in report.drafts[done, row, : report.drafted[done, row]])
                progress = dataclasses.replace(
                    progress,
                    computed=progress.computed + produced,
                    produced_per_round=(*progress.produced_per_round, produced),
                    drafted_blocks=(*progress.drafted_blocks, block),
                )
                if self._speculates(progress) and not block and not violation:
                    reason = f"its context of {progress.computed} tokens is past draft.max_context {self.draft_limit}"
                    progress = dataclasses.replace(progress, fallback=reason)
                    self.host = dataclasses.replace(self.host, fallbacks=self.host.fallbacks + 1)
                self.host = scheduler.replace_running(self.host, progress)
                if self._holds(progress, violation, int(report.position[done, row]), updates):
                    tokens = np.asarray(report.tokens)[done, row, :produced]
                    finished, stopped = bool(report.finished[done, row]), bool(report.stopped[done, row])
                    self._emit(progress, tokens, finished, stopped, now, updates)

    def _holds(self, progress: Progress, violation: int, position: int, updates: dict[str, Update]) -> bool:
        """Whether the request's invariants hold; it is failed by name if not."""
        if violation == 0 and position != progress.computed:
            violation = Violation.position_monotone
        if violation == 0:
            return True
        broken = Violation(violation)
        message = f"{broken.name} is violated: {MEANING[broken]}, and request {progress.request.id!r} broke it"
        if self.config.strict:
            raise InvariantError(message)
        completion = self._finish(progress, "error", message)
        updates[completion.id] = Update(completion.id, (), None, completion)
        return False

    def _emit(
        self,
        progress: Progress,
        tokens: np.ndarray,
        finished: bool,
        stopped: bool,
        now: float,
        updates: dict[str, Update],
    ) -> None:
        """Hands new tokens out, up to a stop string, and finishes the request if it is done."""
        if not len(tokens):
            return
        request_id, text = progress.request.id, None
        new = tuple(int(token) for token in tokens)
        stream = self._texts.get(request_id)
        if stream is not None:
            text = ""
            for count, token in enumerate(new, start=1):
                piece, complete = stream.push(token)
                text += piece
                if complete:
                    new, finished, stopped = new[:count], True, True
                    break
        progress = dataclasses.replace(
            progress,
            emitted=progress.emitted + new,
            first_token=now if progress.first_token is None else progress.first_token,
            last_token=now,
        )
        self.host = scheduler.replace_running(self.host, progress)
        completion = self._finish(progress, "stop" if stopped else "length") if finished else None
        before = updates.get(request_id)
        if before is not None:
            new, text = before.token_ids + new, None if text is None else (before.text or "") + text
        updates[request_id] = Update(request_id, new, text, completion)

    def _publish(self) -> None:
        if not self.config.prefix_cache:
            return
        for progress in self.host.running:
            # Pages of a request that does not draft lack the draft's half: nobody may be handed those.
            if self.k == 0 or progress.fallback is None:
                self.host = scheduler.publish_pages(self.host, progress)

    def _finish(self, progress: Progress, reason: FinishReason, error: str | None = None) -> Completion:
        """Takes a request out of the engine."""
        if progress.slot is None:
            waiting = tuple(p for p in self.host.waiting if p.request.id != progress.request.id)
            self.host = dataclasses.replace(self.host, waiting=waiting)
        else:
            self.host = scheduler.remove(self.host, progress)
            self._leave_row(progress)
        stream = self._texts.pop(progress.request.id, None)
        if stream is not None and reason != "stop":
            stream.finish()
        return Completion(
            id=progress.request.id,
            prompt_tokens=len(progress.request.prompt),
            token_ids=progress.emitted,
            text=None if stream is None else stream.text,
            finish_reason=reason,
            error=error,
            fallback=progress.fallback,
            metrics=metrics_of(progress),
            produced_per_round=progress.produced_per_round,
            drafted_blocks=progress.drafted_blocks,
        )

    def _leave_row(self, progress: Progress) -> None:
        """Empties a request's row and condenses the batch."""
        rows = device.condense(device.vacate(self.state.rows, progress.slot))
        live = len(self.host.running)
        rows = device.resize(rows, scheduler.bucket(max(live, 1), 1, self.config.max_slots))
        self.state = self.state.replace(rows=rows)


def _read(config: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    """A configuration's values, and what to call it in errors."""
    if isinstance(config, Mapping):
        return config, "config"
    try:
        return yaml.safe_load(Path(config).read_text(encoding="utf-8")), str(config)
    except OSError as error:
        raise ConfigError(f"{config} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{config} is not YAML: {error}") from None
