"""The host's half of the engine's state, and what can be done to it without running a step.

With the device's half, `EngineState`, it is all there is to an engine: a snapshot saves the two, a fork
copies them. It is an immutable value, and each function here returns a new one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dflash_jax.engine import display
from dflash_jax.engine.checkpoints import CheckpointPool, empty_checkpoints
from dflash_jax.engine.config import VerifyWidth
from dflash_jax.engine.containers import Log, Queue
from dflash_jax.engine.identity import ModelsIdentity
from dflash_jax.engine.output import Update
from dflash_jax.engine.pages import PagePool, empty_pool, release
from dflash_jax.engine.request import Request, samples_of
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.width import Experience
from dflash_jax.errors import RequestError, quote

NO_LIMIT = int(np.iinfo(np.int32).max)
"""A `draft_limit` that no context reaches."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What plans depend on beside the requests; see `EngineConfig` for those of the same names.

    Attributes:
      max_slots: slots that may be used; at most as many as the device state has.
      prefill_chunk, rounds_per_step, prefix_cache, strict: see `EngineConfig`.
      k: tokens to draft in each round; 0 decodes plainly.
      width: how many of them each round verifies: a number, None for all, "auto" for what experience says pays most.
      draft_limit: context tokens past which a request no longer drafts.
    """

    max_slots: int
    prefill_chunk: int
    rounds_per_step: int = 1
    prefix_cache: bool = True
    strict: bool = False
    k: int = 0
    width: VerifyWidth | None = None
    draft_limit: int = NO_LIMIT


@dataclasses.dataclass(frozen=True)
class Counters:
    """What happened since the engine was made.

    Attributes:
      prefix_tokens_saved: prompt tokens that the prefix cache made unnecessary to run.
      preemptions: times a request gave its pages back.
      fallbacks: requests that stopped speculating.
      damaged_drafts: (request, round) pairs in which the draft's scores were not finite.
      checkpoint_hits, checkpoint_misses: admissions that found pages of a known prefix and, of a hybrid target, a
        checkpoint at the end of one of them, or none.
      tokens_run_again: tokens in known pages that were run again because no checkpoint stood at their end.
    """

    prefix_tokens_saved: int = 0
    preemptions: int = 0
    fallbacks: int = 0
    damaged_drafts: int = 0
    checkpoint_hits: int = 0
    checkpoint_misses: int = 0
    tokens_run_again: int = 0

    def plus(self, **more: int) -> Counters:
        """With some of them increased."""
        return dataclasses.replace(self, **{name: getattr(self, name) + count for name, count in more.items()})


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The last look at whether the first request in the queue can be admitted, when it could not for want of pages.

    As long as it is the first, and none of this changes, looking again would give the same.

    Attributes:
      request: who.
      releases: of the pool by then; only a release makes pages available.
      missing: the hash of the first page of its prompt that was not known; None if all were.
      checkpoints: that there were, of which the deepest decides how many known pages can be shared.
    """

    request: Request
    releases: int
    missing: bytes | None
    checkpoints: CheckpointPool | None


@dataclasses.dataclass(frozen=True)
class HostState:
    """Everything the engine knows that is not on the device.

    Attributes:
      policy: what plans depend on.
      models: the target and the draft that wrote the contexts on the device.
      pool: the account of pages.
      checkpoints: the account of states kept at the ends of pages; None if the target has no recurrent state.
      waiting: requests without a slot by id, first to be served first.
      running: requests with a slot by id, oldest admission first.
      undelivered: updates not returned to the caller yet, by request id.
      next_id: number of the next made-up request id.
      counters: what happened so far.
      experience: what was seen of drafting, if the number of tokens to verify is chosen by it.
      refusal: why the first of the waiting requests waits, if its pages were looked for already.
    """

    policy: Policy
    models: ModelsIdentity
    pool: PagePool
    checkpoints: CheckpointPool | None = None
    waiting: Queue[Sequence] = dataclasses.field(default_factory=Queue)
    running: Queue[Sequence] = dataclasses.field(default_factory=Queue)
    undelivered: Queue[Update] = dataclasses.field(default_factory=Queue)
    next_id: int = 0
    counters: Counters = Counters()
    experience: Experience | None = None
    refusal: Refusal | None = None

    def find(self, request_id: str) -> Sequence | None:
        """A request in flight."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    @property
    def in_flight(self) -> tuple[Sequence, ...]:
        """The requests that run, then those that wait."""
        return (*self.running, *self.waiting)

    def __repr__(self) -> str:
        return display.host_text(self)

    def _repr_html_(self) -> str:
        return display.host_html(self)


def fallback_of(policy: Policy, request: Request) -> str | None:
    """Why a request never drafts although the engine does, if so."""
    if policy.k == 0:
        return None
    if not request.sampling.speculation:
        return "the request asked for no speculation"
    if len(request.prompt) > policy.draft_limit:
        return f"its prompt of {len(request.prompt)} tokens is past draft.max_context {policy.draft_limit}"
    return None


def speculates(policy: Policy, sequence: Sequence) -> bool:
    """Whether a request is drafted for."""
    return policy.k > 0 and sequence.fallback is None


def shares_pages(policy: Policy, sequence: Sequence) -> bool:
    """Whether others may be handed a request's pages: those of one that does not draft lack the draft's half."""
    return policy.prefix_cache and (policy.k == 0 or sequence.fallback is None)


def name_request(host: HostState) -> tuple[HostState, str]:
    """A request id that nobody has, and the state in which it is taken."""
    number = host.next_id
    while host.find(name := f"request-{number}") is not None or name in host.undelivered:
        number += 1
    return dataclasses.replace(host, next_id=number + 1), name


def add(host: HostState, request: Request, now: float) -> HostState:
    """Queues a request, or each of its samples as a request of its own; see `samples_of`.

    Raises:
      RequestError: another one of its id is in flight, or has updates that nobody has taken.
    """
    for name, sampling in samples_of(request.id, request.sampling):
        host = _add_one(host, dataclasses.replace(request, id=name, sampling=sampling), now)
    return host


def _add_one(host: HostState, request: Request, now: float) -> HostState:
    if host.find(request.id) is not None:
        raise RequestError(f"request id {quote(request.id)} is in flight already; ids must be unique")
    if request.id in host.undelivered:
        # The two would be taken for one, and the first one's completion would be lost.
        raise RequestError(
            f"request id {quote(request.id)} has an update that was not delivered yet; take it by step(), or choose "
            "another id"
        )
    fallback = fallback_of(host.policy, request)
    return dataclasses.replace(
        host,
        waiting=host.waiting.append(request.id, Sequence(request, arrived=now, fallback=fallback)),
        counters=host.counters.plus(fallbacks=int(fallback is not None)),
    )


def remove(host: HostState, request_id: str) -> HostState:
    """Takes a request out, wherever it is, and gives its pages back."""
    if request_id in host.waiting:
        return dataclasses.replace(host, waiting=host.waiting.remove(request_id))
    sequence = host.running.get(request_id)
    assert sequence is not None, f"no request {request_id!r} is in flight"
    return dataclasses.replace(host, running=host.running.remove(request_id), pool=release(host.pool, sequence.pages))


def preempt(host: HostState, request_id: str) -> HostState:
    """Takes a running request's pages and puts it at the head of the queue; what it produced is kept."""
    sequence = host.running.get(request_id)
    assert sequence is not None, f"request {request_id!r} does not run"
    host = remove(host, request_id)
    waiting = dataclasses.replace(_as_queued(sequence), preemptions=sequence.preemptions + 1)
    return dataclasses.replace(
        host, waiting=host.waiting.prepend(request_id, waiting), counters=host.counters.plus(preemptions=1)
    )


def restart(host: HostState) -> HostState:
    """Every request waits and no page is used: the host's half for an empty device state.

    The requests then run the tokens they have again, and continue with the same output.
    """
    waiting = Queue((sequence.id, _as_queued(sequence)) for sequence in host.in_flight)
    pool = dataclasses.replace(
        empty_pool(host.pool.num_pages, host.pool.page_size),
        hits=host.pool.hits,
        misses=host.pool.misses,
        evictions=host.pool.evictions,
        releases=host.pool.releases + 1,
    )
    checkpoints = None if host.checkpoints is None else empty_checkpoints(host.checkpoints.capacity)
    return dataclasses.replace(host, running=Queue(), waiting=waiting, pool=pool, checkpoints=checkpoints)


def waiting_under(host: HostState, policy: Policy) -> Queue[Sequence]:
    """The requests that wait; whether they are drafted for is decided again, by another policy."""
    return Queue(
        (name, dataclasses.replace(sequence, fallback=fallback_of(policy, sequence.request)))
        for name, sequence in host.waiting.items()
    )


def _as_queued(sequence: Sequence) -> Sequence:
    return dataclasses.replace(
        sequence, slot=None, pages=Log(), position=0, opened=False, published=0, load=None, saves=()
    )


def shift_times(host: HostState, seconds: float) -> HostState:
    """The state with all its times moved by so many seconds."""

    def shift(sequence: Sequence) -> Sequence:
        times = {name: getattr(sequence, name) for name in ("arrived", "first_token", "last_token")}
        return dataclasses.replace(sequence, **{name: t + seconds for name, t in times.items() if t is not None})

    def shifted(queue: Queue[Sequence]) -> Queue[Sequence]:
        return Queue((key, shift(sequence)) for key, sequence in queue.items())

    return dataclasses.replace(host, waiting=shifted(host.waiting), running=shifted(host.running))
