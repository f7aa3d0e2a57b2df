"""The engine as its users see it: requests in, updates and completions out, snapshots."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.compile_cache import enable_compile_cache
from dflash_jax.engine import display, forks
from dflash_jax.engine import snapshot as snapshots
from dflash_jax.engine.absorb import end
from dflash_jax.engine.admission import make_request, tokenize
from dflash_jax.engine.async_stream import stream_async
from dflash_jax.engine.config import EngineConfig, EngineSetup, VerifyWidth
from dflash_jax.engine.containers import Queue
from dflash_jax.engine.cost_files import CostFiles
from dflash_jax.engine.device import prepare
from dflash_jax.engine.forks import Draft
from dflash_jax.engine.grammars import Grammars
from dflash_jax.engine.host import NO_LIMIT, HostState, add, name_request, remove, restart, shift_times
from dflash_jax.engine.init import empty_device, init_host, make_policy, with_costs, with_policy
from dflash_jax.engine.loading import load, read_setup
from dflash_jax.engine.memory import divide
from dflash_jax.engine.output import Completion, Update, join_updates
from dflash_jax.engine.prompts import Asked, Prompt, Prompts, Sampling, read_prompt, read_prompts, read_sampling
from dflash_jax.engine.reader import NO_TEXT, Reader, TextReader
from dflash_jax.engine.request import sample_id
from dflash_jax.engine.run import Runner, step
from dflash_jax.engine.state import EngineState, Models, is_donated
from dflash_jax.engine.warmup import possible_plans
from dflash_jax.errors import CheckpointError, RequestError, StateError, quote
from dflash_jax.kernels.dispatch import Implementation

_UNCHANGED: Any = object()

Observer = Callable[[HostState, HostState, tuple[Update, ...]], None]
"""Is told of a step: the host's half before it and after it, and what it brought each request."""


class Engine:
    """Generates for many requests at once, drafting for each from its own context.

    An engine is a pair of immutable values, `host` and `state` (the device's half), and `step` replaces them
    by the next pair. Both may be read, kept and compared between steps, and set; with `donate=False` in
    the config old device states stay readable too.

    Threads may share an engine: what one of them does waits for what another is doing.

    Attributes:
      host: requests, page account and undelivered updates.
      state: slots and pages on the device.
      config: sizes and options.
      tokenizer: for text prompts and text output, if the target has one.
      setup: what `from_config` was given, so that a snapshot can be restored without naming the models again.
    """

    setup: EngineSetup | None = None

    def __init__(
        self,
        models: Models,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        k: int | None = None,
        width: VerifyWidth | None = None,
        max_context: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        implementation: Implementation | None = None,
    ):
        """Makes an engine with no requests in it.

        Args:
          models: the target and, to speculate, the draft.
          config: sizes and options.
          tokenizer: for text prompts and text output.
          k: tokens to draft in each round; the trained block_size - 1 by default.
          width: how many of them each round verifies; all by default, "auto" for as many as pay.
          max_context: requests whose context grows past this many tokens continue without drafting.
          clock: seconds, for the metrics.
          implementation: of the kernels; see `kernels.dispatch`.

        Raises:
          ConfigError: target and draft do not fit each other, or the sizes do not fit the models.
        """
        enable_compile_cache()
        self._lock = threading.RLock()
        self.config = divide(config or EngineConfig(), models.target_config, models.draft_config)
        self.tokenizer = tokenizer
        self._clock = clock
        grammars = None if tokenizer is None else Grammars(tokenizer, models.target_config)
        self._run = Runner(
            prepare(models, implementation),
            donate=self.config.donate,
            implementation=implementation,
            grammars=grammars,
        )
        limit = NO_LIMIT if max_context is None else max_context
        policy = make_policy(self.models, self.config, k, width, limit)
        self.host = init_host(self.config, policy, self._run.identity, models.target_config)
        self._costs = CostFiles(self.models, implementation)
        if self.host.experience is not None:
            self.host = with_costs(self.host, self._costs.read(self.host))
        self.state: EngineState = empty_device(self.models, self.config)
        self._read: Reader = NO_TEXT if tokenizer is None else TextReader(tokenizer)
        self._observers: tuple[Observer, ...] = ()

    @property
    def models(self) -> Models:
        """The weights, laid out for the device. `fork(draft=...)` makes an engine with another draft."""
        return self._run.models

    @property
    def k(self) -> int:
        """Tokens drafted in each round; 0 decodes plainly."""
        return self.host.policy.k

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight or any update undelivered."""
        host = self.host
        return bool(len(host.waiting) or len(host.running) or len(host.undelivered))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | EngineSetup | str | Path, *, clock: Callable[[], float] = time.perf_counter
    ) -> Engine:
        """Loads the models a configuration names and makes an engine of them.

        Args:
          config: a mapping with `target`, optionally `draft`, and `engine`; or a YAML file with these,
            which may be a job's.
          clock: seconds, for the metrics.

        Raises:
          ConfigError, CheckpointError: it cannot be done; the message says why.
        """
        enable_compile_cache()
        setup = read_setup(config)
        engine = cls(**load(setup), clock=clock)
        engine.setup = setup
        if setup.engine.warmup:
            engine.warmup()
        return engine

    def warmup(
        self,
        *,
        requests: int | None = None,
        plain: int = 0,
        sampling: Sampling | None = None,
        processed: bool = False,
    ) -> None:
        """Compiles what requests will need, or loads it where it is kept, several programs at once.

        Without it each program is compiled when it is first needed, which no figure of a completion contains either,
        if the clock stands still while programs are compiled (`CompileWatch.clock`).

        Args:
          requests: how many will be in flight at once, at most; as many as there are slots by default.
          plain: how many, at most, when all in flight decode without drafting.
          sampling: what they will ask for, as far as it needs programs of its own: log-probabilities.
          processed: some will have parameters that change logits, such as `logit_bias`, for which there are programs
            of their own.
        """
        with self._lock:
            asked = read_sampling(sampling)
            self._run.prepare(
                self.state, possible_plans(self.host, asked, requests=requests, plain=plain, processed=processed)
            )

    # Requests in and out.

    def add_request(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        request_id: str | None = None,
        **parameters: Any,
    ) -> str:
        """Queues a request and returns its id.

        With `n` above 1 it queues a request for each sample, and returns the id of the first; the others are called
        `sample_id(id, 1)`, `sample_id(id, 2)`, ... Each has updates and a completion of its own, and is aborted by
        itself.

        Args:
          prompt: see `Prompt`. A mapping may have its own `sampling`, which wins over other parameters, and an `id`.
          sampling: parameters, or the ones that differ from the defaults.
          request_id: any string that no request in flight has and no undelivered update; made up if not given.
          **parameters: single ones, such as `temperature=0.7`, that win over `sampling`.

        Raises:
          RequestError: it can never be served; nothing was queued.
        """
        return self._add(read_prompt(prompt, sampling, parameters), request_id)

    def _add(self, asked: Asked, request_id: str | None = None) -> str:
        tokens = self.tokenize(asked.prompt)
        request_id = asked.request_id if request_id is None else request_id
        with self._lock:
            host = self.host
            if request_id is None:
                host, request_id = name_request(host)
            request = make_request(
                request_id,
                tokens,
                asked.sampling,
                target=self.models.target_config,
                max_model_len=self.config.max_model_len,
                pool=host.pool,
                tokenizer=self.tokenizer,
                grammars=self._run.grammars,
            )
            self.host = add(host, request, self._clock())
        return request_id

    def step(self) -> tuple[Update, ...]:
        """Admits, prefills, runs rounds; returns what each request got, and what was not delivered before.

        If this raises, no request is lost. The state is then the one before the step; if its device memory was
        donated already, the requests in flight wait, and run the tokens they have again.

        Raises:
          InvariantError: an invariant is violated and the engine is strict.
        """
        updates: tuple[Update, ...] = ()
        try:
            with self._lock:
                self._advance()
                updates, self.host = tuple(self.host.undelivered), dataclasses.replace(self.host, undelivered=Queue())
        except BaseException:
            # An interruption from the keyboard may come as the lock is let go; what nobody got is undelivered still.
            with self._lock:
                undelivered = join_updates(Queue((update.id, update) for update in updates), self.host.undelivered)
                self.host = dataclasses.replace(self.host, undelivered=undelivered)
            raise
        return updates

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` after each step, in the thread that takes it, with what it did; forks are not observed.

        If it raises, the step is done, and what it brought stays undelivered.

        Returns:
          A function that ends it.
        """
        with self._lock:
            self._observers = (*self._observers, observer)

        def unsubscribe() -> None:
            with self._lock:
                self._observers = tuple(each for each in self._observers if each is not observer)

        return unsubscribe

    def _advance(self) -> None:
        """One step; its updates are added to `host.undelivered`."""
        before = self.host
        try:
            host, state, updates = step(self._run, self.host, self.state, self._clock, self._read)
            host = dataclasses.replace(host, undelivered=join_updates(host.undelivered, updates))
            # Nothing comes between these two, an interruption from the keyboard included.
            self.host, self.state = host, state
            self._costs.write(host)
        except BaseException:
            if is_donated(self.state):
                self.host, self.state = restart(self.host), empty_device(self.models, self.config)
            raise
        for observer in self._observers:
            observer(before, host, updates)

    def abort(self, request_id: str) -> Completion:
        """Ends a request wherever it is, and returns what it has, with what no update has delivered yet.

        Raises:
          RequestError: no such request is in flight.
        """
        with self._lock:
            sequence = self.host.find(request_id)
            if sequence is None:
                raise RequestError(f"no request {quote(request_id)} is in flight, so it cannot be aborted")
            self.host = remove(self.host, request_id)
            self._take(request_id)
            completion = end(sequence, "abort", self._read).completion
        assert completion is not None
        return completion

    def _take(self, request_id: str) -> Update | None:
        """A request's undelivered update, which then is delivered."""
        update = self.host.undelivered.get(request_id)
        if update is not None:
            self.host = dataclasses.replace(self.host, undelivered=self.host.undelivered.remove(request_id))
        return update

    def counters(self) -> dict[str, int]:
        """What happened since the engine was made: pages found and not found in the prefix cache, pages evicted
        from it, and `Counters`."""
        pool = self.host.pool
        return {
            "prefix_hits": pool.hits,
            "prefix_misses": pool.misses,
            "prefix_evictions": pool.evictions,
            **dataclasses.asdict(self.host.counters),
        }

    def slot_of(self, request_id: str) -> int | None:
        """Where on the device a request lives; None while it waits, and once it is done."""
        sequence = self.host.running.get(request_id)
        return None if sequence is None else sequence.slot

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
          RequestError: it is text or messages, and there is no tokenizer or no chat template for it.
        """
        return tokenize(read_prompt(prompt).prompt, self.tokenizer)

    # Whole generations.

    def stream(
        self, prompts: Prompts, sampling: Sampling | Sequence[Sampling] | None = None, **parameters: Any
    ) -> Generator[Update, None, None]:
        """Generates for all prompts at once and yields updates as they come; arguments as of `generate`.

        An abandoned iteration aborts its requests. It ends early for a request that was aborted, or whose last
        update somebody else took, by `step`.
        """
        groups = self._add_all(read_prompts(prompts, sampling, parameters))
        return self._stream([name for group in groups for name in group])

    def stream_async(
        self, prompts: Prompts, sampling: Sampling | Sequence[Sampling] | None = None, **parameters: Any
    ) -> AsyncGenerator[Update, None]:
        """The same for `async for`: the event loop goes on while the engine works, in a thread of the stream's own.

        Several streams may run at once; their requests share the engine's steps. Cancelling the task that iterates, or
        closing the iterator, aborts its requests. They are queued when the first update is asked for, which raises
        what `stream` would.
        """
        return stream_async(lambda: self.stream(prompts, sampling, **parameters))

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool = False,
        **parameters: Any,
    ) -> list[Completion]:
        """Generates for all prompts at once; completions in the prompts' order, one for each prompt.

        Where `n` is above 1 that is the first sample, and its `samples` are all of them.

        Args:
          prompts: one prompt or any iterable of prompts; see `Prompt` for what one may be. A list of integers is one
            prompt, and so is a list of messages.
          sampling: parameters, or the ones that differ from the defaults; or a list with one of either for each prompt.
          progress: show a bar of finished answers and tokens a second on stderr.
          **parameters: single ones, such as `temperature=0.7`, that win over `sampling`.

        Raises:
          RequestError: a prompt can never be served; none was queued.
          StateError: meanwhile another thread aborted one of the requests, or took its last update.
        """
        groups = self._add_all(read_prompts(prompts, sampling, parameters))
        ids = [name for group in groups for name in group]
        updates: Iterable[Update] = self._stream(ids)
        if progress:
            from dflash_jax.progress import shown

            updates = shown(updates, len(ids))
        done = {update.id: update.completion for update in updates if update.completion is not None}
        for request_id in ids:
            if request_id not in done:
                raise StateError(f"request {request_id!r} was aborted, or its last update taken, by another thread")
        samples = [[done[request_id] for request_id in group] for group in groups]
        return [dataclasses.replace(first, others=tuple(others)) if others else first for first, *others in samples]

    def _add_all(self, asked: Iterable[Asked]) -> list[list[str]]:
        """Queues all prompts, or none if one of them cannot be served. Returns the ids of each one's samples."""
        groups: list[list[str]] = []
        try:
            for one in asked:
                request_id = self._add(one)
                groups.append([sample_id(request_id, index) for index in range(one.sampling.n)])
        except BaseException:
            self._drop(name for group in groups for name in group)
            raise
        return groups

    def _stream(self, ids: Sequence[str]) -> Generator[Update, None, None]:
        """Updates of some requests; those of the others stay undelivered."""
        updates = self._updates(ids)
        # From here on it is under way, and ends its requests also if nobody ever asks it for an update.
        next(updates)
        return cast(Generator[Update, None, None], updates)

    def _updates(self, ids: Sequence[str]) -> Generator[Update | None, None, None]:
        unfinished = dict.fromkeys(ids)
        try:
            yield None
            while unfinished:
                with self._lock:
                    self._advance()
                    waiting = self.host.undelivered
                    # The shorter of the two, or a step would take longer the more is queued.
                    if len(waiting) < len(unfinished):
                        mine = [update.id for update in waiting if update.id in unfinished]
                    else:
                        mine = [request_id for request_id in unfinished if request_id in waiting]
                    if not mine:
                        unfinished = {name: None for name in unfinished if self.host.find(name) is not None}
                for request_id in mine:
                    with self._lock:
                        update = self._take(request_id)
                    if update is None:
                        continue
                    if update.completion is not None:
                        del unfinished[request_id]
                    yield update
        finally:
            self._drop(unfinished)

    def _drop(self, ids: Iterable[str]) -> None:
        """Ends those of the requests that are in flight, and forgets what was not delivered of any."""
        for request_id in ids:
            with self._lock:
                if self.host.find(request_id) is not None:
                    self.abort(request_id)
                self._take(request_id)

    # Snapshots and forks.

    def snapshot(self, directory: str | Path) -> None:
        """Saves both halves of the state, requests in flight included, replacing an older snapshot there.

        The weights are not saved, only their identity: names and checksums.
        """
        with self._lock:
            host, state = shift_times(self.host, -self._clock()), self.state
            setup = None if self.setup is None else self.setup.model_dump()
            snapshots.save(Path(directory), state, snapshots.HostSnapshot(host, setup, snapshots.shapes(state)))

    @classmethod
    def restore(
        cls, directory: str | Path, engine: Engine | None = None, *, draft: Draft | None = _UNCHANGED
    ) -> Engine:
        """An engine that continues where the snapshot was taken: the same tokens, the same drafted blocks.

        Args:
          directory: the snapshot.
          engine: an engine of the same models and config, whose requests are replaced; by default the
            models are loaded from what the snapshot's engine was configured with.
          draft: continue with another draft, as in `fork`.

        Raises:
          CheckpointError: there is no complete snapshot, or it is of an engine of other sizes or other models.
        """
        saved = snapshots.load_host(Path(directory))
        if engine is None:
            if saved.setup is None:
                raise CheckpointError(
                    f"{directory} is the snapshot of an engine that was not made by from_config; "
                    "give restore() an engine with its models"
                )
            engine = cls.from_config(saved.setup)
        host = shift_times(with_policy(saved.host, engine.host.policy), engine._clock())
        if draft is not _UNCHANGED:
            engine = engine._with_draft(draft, None, _UNCHANGED)
            forks.check_target(host, engine.host, directory)
            engine.host = forks.recompute(host, engine.host)
        else:
            like = empty_device(engine.models, engine.config, rows=saved.rows, processors=saved.has_processors)
            snapshots.check_fits(Path(directory), saved, engine.host.models, like)
            state = snapshots.load_state(Path(directory), like)
            limits = jnp.full_like(state.slots.draft_limit, host.policy.draft_limit)
            engine.state, engine.host = state.replace(slots=state.slots.replace(draft_limit=limits)), host
        return engine

    def fork(
        self, *, draft: Draft | None = _UNCHANGED, k: int | None = None, width: VerifyWidth | None = _UNCHANGED
    ) -> Engine:
        """A second engine in the same state; from here on the two are independent.

        Args:
          draft: another draft for the second engine: its path, or a loaded one; None decodes plainly. Every
            request's contexts are then computed again from its tokens, and what is drafted from there on is
            what an engine that had this draft from the beginning would draft.
          k: another number of tokens to draft in each round. The contexts stay as they are.
          width: another number of them to verify, None for all. By default what it was, as far as there are so many
            of another `k`; of another draft, all or "auto" as before.

        Raises:
          ConfigError, CheckpointError: the draft cannot be read or does not fit.
        """
        if draft is not _UNCHANGED:
            twin = self._with_draft(draft, k, width)
            twin.host = forks.recompute(self.host, twin.host)
            return twin
        with self._lock:
            twin = self._copy()
            twin.state = jax.tree.map(jnp.copy, self.state) if self.config.donate else self.state
        if k is not None or width is not _UNCHANGED:
            k = self.k if k is None else k
            if width is _UNCHANGED:
                width = forks.width_within(self.host.policy.width, k)
            twin.host = forks.with_drafting(twin.host, self.models, self.config, k, width)
            twin.setup = forks.setup_with_drafting(twin.setup, k, width)
        return twin

    def _copy(self) -> Engine:
        twin = copy.copy(self)
        twin._read = NO_TEXT if self.tokenizer is None else TextReader(self.tokenizer)
        twin._observers = ()
        return twin

    def _with_draft(self, draft: Draft | None, k: int | None, width: VerifyWidth | None) -> Engine:
        """An engine like this one with another draft and no requests."""
        twin = self._copy()
        twin._run = forks.with_draft(self._run, draft, self.config.dtype)
        if width is _UNCHANGED:
            width = "auto" if self.host.policy.width == "auto" else None
        policy = make_policy(twin.models, self.config, k, width, self.host.policy.draft_limit)
        twin.host = init_host(self.config, policy, twin._run.identity, twin.models.target_config)
        twin.state = empty_device(twin.models, self.config)
        # The setup names the draft that was replaced.
        twin.setup = None
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # A copy is used by others, and has a lock of its own.
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return display.engine_text(self.host, self.models)

    def _repr_html_(self) -> str:
        return display.engine_html(self.host, self.models)
