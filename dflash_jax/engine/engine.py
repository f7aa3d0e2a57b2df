"""The engine as its users see it: requests in, updates and completions out, snapshots."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import load_draft, load_target
from dflash_jax.checkpoints.shortlist import read_shortlist
from dflash_jax.engine import scheduler
from dflash_jax.engine import snapshot as snapshots
from dflash_jax.engine.admission import make_request
from dflash_jax.engine.config import EngineSetup
from dflash_jax.engine.core import Core
from dflash_jax.engine.outbox import Outbox
from dflash_jax.engine.request import Completion, Progress, Request, SamplingParams, Update
from dflash_jax.engine.scheduler import HostState
from dflash_jax.engine.state import Models
from dflash_jax.errors import CheckpointError, RequestError, quote
from dflash_jax.models.draft import make_shortlist
from dflash_jax.settings import parse, read_settings
from dflash_jax.text.chat import read_chat

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or a mapping with `messages` and what else there is to say; see `text.chat`."""

_OF_A_JOB = ("sampling", "input", "output", "report")


class Engine(Core):
    """Generates for many requests at once, drafting for each from its own context."""

    setup: EngineSetup | None = None
    """What `from_config` was given, so that a snapshot can be restored without naming the models again."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | EngineSetup | str | Path) -> Engine:
        """Loads the models a configuration names and makes an engine of them.

        Args:
          config: a mapping with `target`, optionally `draft`, and `engine`; or a YAML file with these,
            which may be a job's.

        Raises:
          ConfigError, CheckpointError: it cannot be done; the message says why.
        """
        if isinstance(config, str | Path):
            # A job's file will do: what it says beyond the engine is for the job.
            values = {name: value for name, value in read_settings(config).items() if name not in _OF_A_JOB}
            setup = parse(EngineSetup, values, str(config))
        else:
            setup = config if isinstance(config, EngineSetup) else parse(EngineSetup, config, "config")
        target = load_target(setup.target.path, setup.engine.dtype)
        tokenizer = setup.target.spoken_to(target.tokenizer)
        models = Models(target.params, target.config)
        k = max_context = None
        if setup.draft is not None:
            draft = load_draft(setup.draft.path, setup.engine.dtype, setup.draft.mask_token_id)
            models = models.replace(draft=draft.params, draft_config=draft.config)
            if setup.draft.shortlist is not None:
                tokens = read_shortlist(setup.draft.shortlist, target.config.vocab_size, draft.config.candidates)
                models = models.replace(shortlist=make_shortlist(target.params, tokens))
            k, max_context = setup.draft.k, setup.draft.max_context
        engine = cls(models, setup.engine, tokenizer=tokenizer, k=k, max_context=max_context)
        engine.setup = setup
        return engine

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
          prompt: text, token ids, chat messages, or a mapping of `messages`, `tools`, `chat_template_kwargs` and
            `continue_final_message`.
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
        request = make_request(
            request_id,
            self.tokenize(prompt),
            sampling,
            target=self.models.target_config,
            max_model_len=self.config.max_model_len,
            pool=self.host.pool,
            tokenizer=self.tokenizer,
        )
        progress = Progress(request, arrived=self._clock(), fallback=self._fallback_of(request))
        self.host = dataclasses.replace(
            self.host,
            waiting=(*self.host.waiting, progress),
            fallbacks=self.host.fallbacks + (progress.fallback is not None),
        )
        self._outbox.open(request)
        return request_id

    def abort(self, request_id: str) -> Completion:
        """Ends a request wherever it is, and returns what it has.

        Raises:
          RequestError: no such request is in flight.
        """
        for progress in (*self.host.waiting, *self.host.running):
            if progress.request.id == request_id:
                self._remove(progress)
                return self._outbox.close(progress, "abort", deliver=False)
        raise RequestError(f"no request {request_id!r} is in flight, so it cannot be aborted")

    def counters(self) -> dict[str, int]:
        """What happened since the engine was made: pages found and not found in the prefix cache, pages evicted
        from it, prompt tokens it saved from being run, preemptions, and requests that fell back to plain decoding."""
        host, pool = self.host, self.host.pool
        return {
            "prefix_hits": pool.hits,
            "prefix_misses": pool.misses,
            "prefix_evictions": pool.evictions,
            "prefix_tokens_saved": host.tokens_saved,
            "preemptions": host.preemptions,
            "fallbacks": host.fallbacks,
        }

    def slot_of(self, request_id: str) -> int | None:
        """Where on the device a request lives; None while it waits, and once it is done."""
        return next((p.slot for p in self.host.running if p.request.id == request_id), None)

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
          RequestError: it is text or messages, and there is no tokenizer or no chat template for it.
        """
        kinds = {type(part) for part in prompt} if isinstance(prompt, Sequence) else set()
        if not isinstance(prompt, str) and kinds and all(issubclass(kind, int | np.integer) for kind in kinds):
            return tuple(int(token) for token in prompt)  # type: ignore[arg-type]
        if isinstance(prompt, Sequence) and not prompt:
            return ()
        is_chat = isinstance(prompt, Mapping) or (bool(kinds) and all(issubclass(kind, Mapping) for kind in kinds))
        if not isinstance(prompt, str) and not is_chat:
            raise RequestError(
                f"the prompt is {quote(prompt)}; it must be text, a list of token ids, or a list of messages, "
                "which may be the `messages` of a mapping"
            )
        if self.tokenizer is None:
            raise RequestError("the prompt is text, but the model has no tokenizer; give token ids instead")
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        return tuple(self.tokenizer.encode_chat(read_chat(prompt)))  # type: ignore[arg-type]

    # Whole generations.

    def stream(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any] | None = None
    ) -> Iterator[Update]:
        """Generates for all prompts at once and yields updates as they come.

        An abandoned iteration aborts its requests.
        """
        return self._stream(self._add_all(prompts, sampling))

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """Generates for all prompts at once; completions in the prompts' order."""
        ids = self._add_all(prompts, sampling)
        done = {update.id: update.completion for update in self._stream(ids) if update.completion is not None}
        return [done[request_id] for request_id in ids]

    def _add_all(self, prompts: Sequence[Prompt], sampling: SamplingParams | Mapping[str, Any] | None) -> list[str]:
        """Queues all prompts, or none if one of them cannot be served."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or any(isinstance(p, int) for p in prompts):
            raise RequestError(f"prompts is {quote(prompts)}; it must be a list of prompts, also if there is only one")
        ids: list[str] = []
        try:
            for prompt in prompts:
                ids.append(self.add_request(prompt, sampling))
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return ids

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

    # Snapshots.

    def snapshot(self, directory: str | Path) -> None:
        """Saves everything but the weights, in the middle of whatever goes on, replacing an older snapshot there."""
        now = self._clock()
        host = scheduler.shift_times(self.host, -now)
        setup = None if self.setup is None else self.setup.model_dump()
        saved = snapshots.HostSnapshot(host, self._next_id, setup, snapshots.shapes(self.state))
        snapshots.save(Path(directory), self.state, saved)

    @classmethod
    def restore(cls, directory: str | Path, engine: Engine | None = None) -> Engine:
        """An engine that goes on where the snapshot was taken: the same tokens, the same drafted blocks.

        Args:
          directory: the snapshot.
          engine: an engine of the same models and config, whose requests are replaced; by default the
            models are loaded from what the snapshot's engine was configured with.

        Raises:
          CheckpointError: there is no complete snapshot, or it is of an engine of other sizes.
        """
        saved = snapshots.load_host(Path(directory))
        if engine is None:
            if saved.setup is None:
                raise CheckpointError(
                    f"{directory} is the snapshot of an engine that was not made by from_config; "
                    "give restore() an engine with its models"
                )
            engine = cls.from_config(saved.setup)
        rows = saved.shape_of[".rows.idx_mapping"][0]
        like = engine._empty_state(rows)
        if snapshots.shapes(like) != saved.shape_of:
            different = next(
                name for name, shape in snapshots.shapes(like).items() if shape != saved.shape_of.get(name)
            )
            raise CheckpointError(
                f"{directory} is the snapshot of another engine: its state{different} is "
                f"{saved.shape_of.get(different)}, this engine's is {snapshots.shapes(like)[different]}"
            )
        engine.state = snapshots.load_state(Path(directory), like)
        engine._resume(scheduler.shift_times(saved.host, engine._clock()), saved.next_id)
        return engine

    def fork(self) -> Engine:
        """A second engine in the same state; from here on the two are independent."""
        twin = copy.copy(self)
        twin.state = jax.tree.map(jnp.copy, self.state) if self.config.donate else self.state
        twin._resume(self.host, self._next_id)
        return twin

    def _resume(self, host: HostState, next_id: int) -> None:
        self.host, self._next_id, self._outbox = host, next_id, Outbox(self.tokenizer)
        for progress in (*host.running, *host.waiting):
            self._outbox.open(progress.request, progress.emitted)

    # Requests.

    def _fallback_of(self, request: Request) -> str | None:
        """Why a request never drafts, if so."""
        if self.k == 0:
            return None
        if not request.sampling.speculation:
            return "the request asked for no speculation"
        if len(request.prompt) > self.draft_limit:
            return f"its prompt of {len(request.prompt)} tokens is past draft.max_context {self.draft_limit}"
        return None
