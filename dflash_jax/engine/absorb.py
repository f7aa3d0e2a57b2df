"""What a step's report means for the requests: a pure function of the host's state."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from dflash_jax.engine.checkpoints import Checkpoint, give_back, keep
from dflash_jax.engine.containers import Log
from dflash_jax.engine.host import HostState, Policy, remove, shares_pages, speculates
from dflash_jax.engine.invariants import MEANING, Violation
from dflash_jax.engine.logprob_records import TokenLogprob, records
from dflash_jax.engine.output import FinishReason, Update, completion_of, prompt_logprobs_of
from dflash_jax.engine.pages import publish
from dflash_jax.engine.plan import Chunk, Plan
from dflash_jax.engine.reader import NO_TEXT, Reader
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.steps import Report
from dflash_jax.engine.width import learn
from dflash_jax.errors import InvariantError

if TYPE_CHECKING:
    from dflash_jax.engine.run import StepReport
    from dflash_jax.sampling import Logprobs


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
    policy, changes = host.policy, []
    if report.prefill is not None:
        for chunk, row in zip(plan.chunks, _rows(report.prefill), strict=True):
            if chunk is not None:
                sequence = _running(host, chunk.id)
                host = _absorb_checkpoint(host, sequence, chunk, good=not row.violation)
                changes.append(_Change(sequence, *_absorb_chunk(policy, sequence, chunk, row, now, read)))
    if report.decode is not None:
        rounds = [_rows(report.decode, done) for done in range(plan.rounds)]
        absorbed: set[str] = set()
        for decode, *rows in zip(plan.decodes, *rounds, strict=True):
            # In a second row a request breaks `slot_exclusive`, which its first row tells.
            if decode is not None and decode.id not in absorbed:
                absorbed.add(decode.id)
                sequence = _running(host, decode.id)
                changes.append(_Change(sequence, *_absorb_rounds(policy, sequence, rows, now, read)))
        host = _learn(host, plan, report.decode, report.seconds)
    host = publish_pages(_apply(host, changes))
    return host, tuple(change.update for change in changes if change.update is not None)


class _Row(NamedTuple):
    """One row of a `Report`, in Python's numbers."""

    tokens: list[int]
    produced: int
    drafts: list[int]
    num_drafts: int
    num_verified: int
    damaged_draft: bool
    position: int
    finished: bool
    stopped: bool
    violation: int
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @property
    def committed(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.produced])

    @property
    def block(self) -> tuple[int, ...]:
        return tuple(self.drafts[: self.num_drafts])


def _rows(report: Report, at: int | EllipsisType = ...) -> list[_Row]:
    """The rows of a report, or of one of the rounds stacked in it.

    Arrays become lists as a whole: taking single values out of them costs more than all else on the host.
    """
    columns = [np.asarray(getattr(report, name))[at].tolist() for name in _Row._fields if name not in _BESIDE]
    # Few steps have any of these, and few of their rows want them: they stay arrays.
    beside = {name: found for name in _BESIDE if (found := getattr(report, name)) is not None}
    rows = [*itertools.starmap(_Row, zip(*columns, strict=True))]
    if not beside:
        return rows
    for n, row in enumerate(rows):
        parts: dict[str, Any] = {name: _one_row(found, at, n) for name, found in beside.items()}
        rows[n] = row._replace(**parts)
    return rows


def _one_row(found: Logprobs, at: int | EllipsisType, row: int) -> Logprobs:
    return jax.tree.map(lambda part: part[at][row], found)


_BESIDE = ("logprobs", "prompt_logprobs")


class _Change(NamedTuple):
    """A request before and after a step, and what the step brought it."""

    before: Sequence
    after: Sequence
    update: Update | None

    @property
    def ended(self) -> bool:
        return self.update is not None and self.update.completion is not None


def _running(host: HostState, request_id: str) -> Sequence:
    sequence = host.running.get(request_id)
    assert sequence is not None, f"request {request_id!r} of the plan does not run"
    return sequence


def _apply(host: HostState, changes: Iterable[_Change]) -> HostState:
    """The state after the changes, without the requests that ended."""
    host = dataclasses.replace(
        host,
        running=host.running.replace_all((change.after.id, change.after) for change in changes),
        counters=host.counters.plus(
            damaged_drafts=sum(change.after.damaged_drafts - change.before.damaged_drafts for change in changes),
            fallbacks=sum(change.after.fallback is not change.before.fallback for change in changes),
        ),
    )
    for change in changes:
        if change.ended:
            host = remove(host, change.after.id)
    return host


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


def _absorb_chunk(
    policy: Policy, sequence: Sequence, chunk: Chunk, row: _Row, now: float, read: Reader
) -> tuple[Sequence, Update | None]:
    position = sequence.position + len(chunk.tokens)
    if row.violation or row.position != position:
        return _fail(policy, sequence, Violation(row.violation or Violation.position_monotone), read)
    sequence = dataclasses.replace(
        sequence, position=position, prompt_logprobs=_prompt_logprobs(sequence, chunk, row, read)
    )
    if not row.produced:
        return sequence, None
    taken, text, at_stop_string = read(sequence, row.committed)
    sequence = dataclasses.replace(
        sequence,
        logprobs=_logprobs(sequence, taken, row, read),
        output=sequence.output.extend(taken),
        first_token=now if sequence.first_token is None else sequence.first_token,
        last_token=now,
    )
    update = _update(sequence, row, taken, text, at_stop_string, read)
    return sequence, dataclasses.replace(update, prompt_logprobs=prompt_logprobs_of(sequence))


def _prompt_logprobs(sequence: Sequence, chunk: Chunk, row: _Row, read: Reader) -> Log[TokenLogprob]:
    """With those of a chunk's tokens; a request that resumed may have some of them already."""
    top, known = sequence.request.sampling.prompt_logprobs, sequence.prompt_logprobs
    if not chunk.following or row.prompt_logprobs is None or top is None:
        return known
    fresh = len(known) - sequence.position
    found = jax.tree.map(lambda part: part[fresh:], row.prompt_logprobs)
    return known.extend(records(chunk.following[fresh:], found, top, read.token_text))


def _logprobs(sequence: Sequence, taken: tuple[int, ...], row: _Row, read: Reader) -> Log[TokenLogprob]:
    """With those of the tokens that became output."""
    top = sequence.request.sampling.logprobs
    if row.logprobs is None or top is None:
        return sequence.logprobs
    return sequence.logprobs.extend(records(taken, row.logprobs, top, read.token_text))


def _absorb_rounds(
    policy: Policy, sequence: Sequence, rows: Iterable[_Row], now: float, read: Reader
) -> tuple[Sequence, Update | None]:
    update: Update | None = None
    for row in rows:
        sequence, news = _absorb_round(policy, sequence, row, now, read)
        if news is not None:
            update = news if update is None else update.then(news)
            if news.completion is not None:
                break
    return sequence, update


def _absorb_round(
    policy: Policy, sequence: Sequence, row: _Row, now: float, read: Reader
) -> tuple[Sequence, Update | None]:
    if row.violation:
        return _fail(policy, sequence, Violation(row.violation), read)
    if not row.produced:
        # Another row ended the step's rounds before this one.
        return sequence, None
    position, block, fallback = sequence.position + row.produced, row.block, sequence.fallback
    if row.position != position:
        return _fail(policy, sequence, Violation.position_monotone, read)
    if speculates(policy, sequence) and sequence.position > policy.draft_limit:
        fallback = f"its context of {sequence.position} tokens is past draft.max_context {policy.draft_limit}"
    # Tokens behind a stop string were accepted, but are not output and do not count.
    taken, text, at_stop_string = read(sequence, row.committed)
    sequence = dataclasses.replace(
        sequence,
        position=position,
        output=sequence.output.extend(taken),
        produced_per_round=sequence.produced_per_round.extend((len(taken),)),
        drafted_blocks=sequence.drafted_blocks.extend((block,)),
        verified_per_round=sequence.verified_per_round.extend((row.num_verified,)),
        damaged_drafts=sequence.damaged_drafts + row.damaged_draft,
        fallback=fallback,
        logprobs=_logprobs(sequence, taken, row, read),
        last_token=now,
    )
    return sequence, _update(sequence, row, taken, text, at_stop_string, read)


def _update(
    sequence: Sequence, row: _Row, taken: tuple[int, ...], text: str | None, at_stop_string: bool, read: Reader
) -> Update:
    """What new tokens are to a request that has taken them in, with its completion if they are its last."""
    wanted = sequence.request.sampling.logprobs is not None
    logprobs = sequence.logprobs[len(sequence.logprobs) - len(taken) :] if wanted else None
    update = Update(sequence.id, taken, text, logprobs=logprobs)
    if not (row.finished or at_stop_string):
        return update
    reason: FinishReason = "stop" if row.stopped or at_stop_string else "length"
    return update.then(end(sequence, reason, read))


def _fail(policy: Policy, sequence: Sequence, broken: Violation, read: Reader) -> tuple[Sequence, Update]:
    """Ends a request by the name of what it broke."""
    if broken is Violation.finite_logits:
        message = f"{broken.name} is violated: {MEANING[broken]}, and those of request {sequence.id!r} are not"
    elif broken is Violation.token_allowed:
        message = (
            f"{broken.name} is violated: {MEANING[broken]}, and those of request {sequence.id!r} allow none after "
            f"{len(sequence.output)} tokens of output"
        )
    else:
        message = f"{broken.name} is violated: {MEANING[broken]}, and request {sequence.id!r} broke it"
        if policy.strict:
            raise InvariantError(message)
    return sequence, end(sequence, "error", read, message)


def end(sequence: Sequence, reason: FinishReason, read: Reader, error: str | None = None) -> Update:
    """The last update of a request, with its completion."""
    text, rest = read.finish(sequence)
    return Update(sequence.id, (), rest, completion_of(sequence, text, reason, error))


def _learn(host: HostState, plan: Plan, rounds: Report, seconds: float | None) -> HostState:
    """With the rounds in the host's experience, if it keeps any."""
    if host.experience is None:
        return host
    seen = learn(host.experience, rounds, tokens=plan.tokens, context=plan.context, seconds=seconds)
    return dataclasses.replace(host, experience=seen)


def publish_pages(host: HostState) -> HostState:
    """Makes the newly full pages of running requests findable for the prefix cache."""
    if not host.policy.prefix_cache:
        return host
    pool, published, size = host.pool, [], host.pool.page_size
    for sequence in host.running:
        full = sequence.position // size
        if full > sequence.published and shares_pages(host.policy, sequence):
            sequence = sequence.hashed(full, size)
            new = slice(sequence.published, full)
            pool = publish(pool, sequence.pages[new], sequence.hashes[new])
            published.append((sequence.id, dataclasses.replace(sequence, published=full)))
    return dataclasses.replace(host, pool=pool, running=host.running.replace_all(published)) if published else host
