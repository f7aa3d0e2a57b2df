"""What a step's report means for the requests: a pure function of the host's state."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_jax.engine.checkpoints import Checkpoint, give_back, keep
from dflash_jax.engine.containers import Queue
from dflash_jax.engine.host import HostState, remove, shares_pages, speculates
from dflash_jax.engine.invariants import MEANING, Violation
from dflash_jax.engine.output import FinishReason, Update, completion_of, join_updates
from dflash_jax.engine.pages import publish
from dflash_jax.engine.plan import Chunk, Plan
from dflash_jax.engine.reader import NO_TEXT, Reader
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.steps import Report
from dflash_jax.engine.width import learn
from dflash_jax.errors import InvariantError

if TYPE_CHECKING:
    from dflash_jax.engine.run import StepReport


def absorb(
    host: HostState, plan: Plan, report: StepReport, now: float, read: Reader = NO_TEXT
) -> tuple[HostState, tuple[Update, ...]]:
    """Takes in what a plan brought.

    Args:
      host: the state that `make_plan` returned with the plan.
      plan: what was run.
      report: what came of it.
      now: when, in seconds on the engine's clock.
      read: makes text of a request's new tokens and finds stop strings in it; by default there is no text.

    Returns:
      The state after the step, and what the step brought each request.

    Raises:
      InvariantError: the engine is strict and a request broke an invariant.
    """
    news: Queue[Update] = Queue()
    if report.prefill is not None:
        prefilled = _lists(report.prefill)
        for row, chunk in enumerate(plan.chunks):
            if chunk is not None:
                host, update = _absorb_chunk(host, chunk, _Row(prefilled, row), now, read)
                news = join_updates(news, update)
    if report.decode is not None:
        decoded = _lists(report.decode)
        for done in range(plan.rounds):
            for row, decode in enumerate(plan.decodes):
                if decode is not None and decode.id in host.running:
                    host, update = _absorb_round(host, decode.id, _Row(decoded, done, row), now, read)
                    news = join_updates(news, update)
        if host.experience is not None:
            seen = learn(
                host.experience, report.decode, tokens=plan.tokens, context=plan.context, seconds=report.seconds
            )
            host = dataclasses.replace(host, experience=seen)
    return publish_pages(host), tuple(news)


class _Row:
    """One row of a report."""

    def __init__(self, report: _Lists, *at: int):
        def here(name: str) -> Any:
            value = report[name]
            for index in at:
                value = value[index]
            return value

        self.violation = Violation(here("violation"))
        self.position: int = here("position")
        self.tokens: tuple[int, ...] = tuple(here("tokens")[: here("produced")])
        self.block: tuple[int, ...] = tuple(here("drafts")[: here("num_drafts")])
        self.verified: int = here("num_verified")
        self.finished: bool = here("finished")
        self.stopped: bool = here("stopped")
        self.damaged_draft: bool = here("damaged_draft")


_Lists = dict[str, Any]
"""A report's arrays as nested lists: taking single values out of arrays costs more than all else on the host."""


def _lists(report: Report) -> _Lists:
    return {field.name: np.asarray(getattr(report, field.name)).tolist() for field in dataclasses.fields(report)}


def _absorb_chunk(
    host: HostState, chunk: Chunk, row: _Row, now: float, read: Reader
) -> tuple[HostState, tuple[Update, ...]]:
    sequence = host.running.get(chunk.id)
    assert sequence is not None, f"request {chunk.id!r} of the plan does not run"
    host = _absorb_checkpoint(host, sequence, chunk, good=not row.violation)
    if row.violation:
        return _fail(host, sequence, row.violation, read)
    sequence = dataclasses.replace(sequence, position=sequence.position + len(chunk.tokens))
    if row.position != sequence.position:
        return _fail(host, sequence, Violation.position_monotone, read)
    return _produce(host, sequence, row, now, read, in_round=False)


def _absorb_checkpoint(host: HostState, sequence: Sequence, chunk: Chunk, *, good: bool) -> HostState:
    """A checkpoint that the chunk wrote can be found from now on, by the hash of the page that ends there."""
    if chunk.save is None or host.checkpoints is None:
        return host
    if not good:
        return dataclasses.replace(host, checkpoints=give_back(host.checkpoints, chunk.save))
    tokens = sequence.position + len(chunk.tokens)
    pages = tokens // host.pool.page_size
    key = sequence.hashed(pages, host.pool.page_size).hashes[pages - 1]
    return dataclasses.replace(host, checkpoints=keep(host.checkpoints, key, Checkpoint(chunk.save, tokens)))


def _absorb_round(
    host: HostState, request_id: str, row: _Row, now: float, read: Reader
) -> tuple[HostState, tuple[Update, ...]]:
    sequence = host.running.get(request_id)
    assert sequence is not None, f"request {request_id!r} of the plan does not run"
    if row.violation:
        return _fail(host, sequence, row.violation, read)
    if not row.tokens:
        # Another row ended the step's rounds before this one.
        return host, ()
    limit, before = host.policy.draft_limit, sequence.position
    sequence = dataclasses.replace(
        sequence,
        position=before + len(row.tokens),
        damaged_drafts=sequence.damaged_drafts + row.damaged_draft,
    )
    counters = host.counters.plus(damaged_drafts=int(row.damaged_draft))
    if speculates(host.policy, sequence) and before > limit:
        reason = f"its context of {before} tokens is past draft.max_context {limit}"
        sequence = dataclasses.replace(sequence, fallback=reason)
        counters = counters.plus(fallbacks=1)
    host = dataclasses.replace(host, counters=counters)
    if row.position != sequence.position:
        return _fail(host, sequence, Violation.position_monotone, read)
    return _produce(host, sequence, row, now, read, in_round=True)


def _produce(
    host: HostState, sequence: Sequence, row: _Row, now: float, read: Reader, *, in_round: bool
) -> tuple[HostState, tuple[Update, ...]]:
    """Adds a row's tokens to a request's output, up to a stop string, and ends the request if it is done."""
    if not row.tokens:
        return dataclasses.replace(host, running=host.running.replace(sequence.id, sequence)), ()
    taken, text, at_stop_string = read(sequence, row.tokens)
    if in_round:
        # Tokens behind a stop string were accepted, but are not output and do not count.
        sequence = dataclasses.replace(
            sequence,
            produced_per_round=sequence.produced_per_round.extend([len(taken)]),
            drafted_blocks=sequence.drafted_blocks.extend([row.block]),
            verified_per_round=sequence.verified_per_round.extend([row.verified]),
        )
    sequence = dataclasses.replace(
        sequence,
        output=sequence.output.extend(taken),
        first_token=now if sequence.first_token is None else sequence.first_token,
        last_token=now,
    )
    host = dataclasses.replace(host, running=host.running.replace(sequence.id, sequence))
    update = Update(sequence.id, taken, text)
    if not (row.finished or at_stop_string):
        return host, (update,)
    reason: FinishReason = "stop" if row.stopped or at_stop_string else "length"
    return remove(host, sequence.id), (update, end(sequence, reason, read))


def _fail(host: HostState, sequence: Sequence, broken: Violation, read: Reader) -> tuple[HostState, tuple[Update, ...]]:
    """Ends a request by the name of what it broke."""
    if broken is Violation.finite_logits:
        message = f"{broken.name} is violated: {MEANING[broken]}, and those of request {sequence.id!r} are not"
    else:
        message = f"{broken.name} is violated: {MEANING[broken]}, and request {sequence.id!r} broke it"
        if host.policy.strict:
            raise InvariantError(message)
    return remove(host, sequence.id), (end(sequence, "error", read, message),)


def end(sequence: Sequence, reason: FinishReason, read: Reader, error: str | None = None) -> Update:
    """The last update of a request, with its completion."""
    text, rest = read.finish(sequence)
    return Update(sequence.id, (), rest, completion_of(sequence, text, reason, error))


def publish_pages(host: HostState) -> HostState:
    """Makes the newly full pages of running requests findable for the prefix cache."""
    if not host.policy.prefix_cache:
        return host
    size = host.pool.page_size
    for sequence in host.running:
        full = sequence.position // size
        if full > sequence.published and shares_pages(host.policy, sequence):
            sequence = sequence.hashed(full, size)
            new = slice(sequence.published, full)
            pool = publish(host.pool, sequence.pages[new], sequence.hashes[new])
            sequence = dataclasses.replace(sequence, published=full)
            host = dataclasses.replace(
                host,
                pool=pool,
                running=host.running.replace(sequence.id, sequence),
            )
    return host
