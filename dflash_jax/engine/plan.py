"""What a step will do: a pure function of the host's state.

Requests are served in the order they came, save that one whose very prompt another is running waits
for its pages. One is admitted when a slot is free and its whole prompt has pages, so requests that
prefill never wait for more; pages for what it produces come round by round. When they run out the
newest request gives its pages back and waits at the head of the queue: the oldest always advances,
so everything finishes.

A plan lists the step's rows. Which request sits in which row is written nowhere else: `idx_mapping` is
made of the plan, whole, in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Sequenced

import numpy as np
from jaxtyping import Float

from dflash_jax.engine.admit import admit
from dflash_jax.engine.checkpoints import take
from dflash_jax.engine.costs import context_of
from dflash_jax.engine.grammars import Constraint
from dflash_jax.engine.host import HostState, Policy, preempt, speculates
from dflash_jax.engine.pages import (
    allocate,
    check_pages_counted,
    check_pages_exclusive,
    pages_for,
)
from dflash_jax.engine.request import Request
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.width import Width, choose_width, widths


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a slot's entry is made of when its request's first chunk runs.

    Attributes:
      request: the request.
      pages: its pages, in order of position.
      position: tokens that are in them already, from the prefix cache.
      tokens_left: tokens it may still produce.
      speculating: it is drafted for.
      draft_limit: context tokens past which it no longer drafts.
      load: the checkpoint that its recurrent state begins with; None for zeros.
      tokens: all tokens it has, if logits processors look at them.
    """

    request: Request
    pages: tuple[int, ...]
    position: int
    tokens_left: int
    speculating: bool
    draft_limit: int
    load: int | None = None
    tokens: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a prompt to run.

    Attributes:
      id, slot: the request, and where it lives.
      tokens: the piece.
      last: the prompt ends with it.
      known_next: the token after the prompt, for a request that resumes; None to sample it.
      opening: the slot's new entry, with a prompt's first piece.
      save: the checkpoint that keeps the recurrent state at the piece's end; None for none.
      logprobs: how many of the most likely tokens to report with the token that is sampled after the prompt; None
        reports no log-probabilities.
      following: the prompt's token after each of the piece's, where their log-probabilities are to be reported.
      prompt_logprobs: how many of the most likely tokens to report with each of those.
      processed: the request needs logits processors.
      constraint: its structured output; only where the piece decides a token.
    """

    id: str
    slot: int
    tokens: tuple[int, ...]
    last: bool
    known_next: int | None
    opening: Opening | None
    save: int | None = None
    logprobs: int | None = None
    following: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    processed: bool = False
    constraint: Constraint | None = None


@dataclasses.dataclass(frozen=True)
class Decode:
    """A request to run rounds for.

    Attributes:
      id, slot: the request, and where it lives.
      first_page: logical number of the first of `new_pages`.
      new_pages: pages it was given for what the rounds may commit.
      logprobs: how many of the most likely tokens to report with each token; None reports no log-probabilities.
      processed: the request needs logits processors.
      constraint: its structured output.
    """

    id: str
    slot: int
    first_page: int = 0
    new_pages: tuple[int, ...] = ()
    logprobs: int | None = None
    processed: bool = False
    constraint: Constraint | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
      chunks: rows that prefill, None for an empty row.
      chunk_width: tokens that each of them is padded to.
      decodes: rows that run rounds, None for an empty row.
      table_width: pages that each of those may be given.
      drafts: tokens to draft for each request in each round; 0 decodes plainly.
      width: how many of them are verified, at most.
      tokens: how many tokens the target runs in each round, drafted ones and others; None for all of them.
      chance: that drafted tokens are kept, by which those that are verified are chosen.
      context: the class of the contexts' lengths; see `costs.context_of`.
      rounds: rounds at most.
    """

    chunks: tuple[Chunk | None, ...] = ()
    chunk_width: int = 0
    decodes: tuple[Decode | None, ...] = ()
    table_width: int = 0
    drafts: int = 0
    width: int = 0
    tokens: int | None = None
    chance: Float[np.ndarray, "drafts bins"] | None = dataclasses.field(default=None, compare=False)
    context: int = 0
    rounds: int = 0

    def permuted(self, chunks: Sequenced[int], decodes: Sequenced[int]) -> Plan:
        """The same step with its rows in another order, which must not matter to anybody.

        Args:
          chunks, decodes: for each new row the row that comes there; -1 for an empty one, so that a batch
            can also grow.
        """

        def gather(rows: tuple, order: Sequenced[int]) -> tuple:
            return tuple(None if row < 0 else rows[row] for row in order)

        return dataclasses.replace(self, chunks=gather(self.chunks, chunks), decodes=gather(self.decodes, decodes))


def make_plan(host: HostState) -> tuple[HostState, Plan]:
    """Decides what the next step does.

    Returns:
      The state with requests admitted and preempted and with pages given, and the plan.

    Raises:
      InvariantError: `pages_conserved` or `pages_exclusive` does not hold.
    """
    host, plan = reserve(admit(host), rounds=host.policy.rounds_per_step)
    _check_pages(host)
    host, chunks, width = take_chunks(host)
    return host, dataclasses.replace(plan, chunks=_padded(chunks, host.policy.max_slots), chunk_width=width)


def reserve(host: HostState, *, rounds: int) -> tuple[HostState, Plan]:
    """Pages for what rounds may commit, and the plan to run that many for every decoding request.

    When pages run out, the newest requests make room. With a request of structured output the plan is for one round:
    what its grammar allows next is known only after it.
    """
    policy = host.policy
    if any(sequence.decoding and _constraint(sequence) is not None for sequence in host.running):
        rounds = 1
    host, new_pages = _take_pages(host, rounds * (1 + policy.k))
    decoding = [sequence for sequence in host.running if sequence.decoding]
    decodes = []
    for sequence in decoding:
        pages = new_pages.get(sequence.id, ())
        first, request = len(sequence.pages) - len(pages), sequence.request
        decodes.append(
            Decode(
                sequence.id,
                _slot(sequence),
                first,
                pages,
                logprobs=request.sampling.logprobs,
                processed=request.is_processed,
                constraint=_constraint(sequence),
            )
        )
    most = max((len(pages) for pages in new_pages.values()), default=0)
    plan = Plan(
        decodes=_padded(decodes, policy.max_slots),
        # Nearly always the usual width, so that nearly always one program will do.
        table_width=bucket(most, pages_for(rounds * (1 + policy.k), host.pool.page_size)),
        rounds=rounds,
    )
    return host, _with_width(plan, host, decoding)


def _with_width(plan: Plan, host: HostState, decoding: list[Sequence]) -> Plan:
    """The plan with what its rounds draft and verify, as the policy says or as experience does."""
    rows, k = len(plan.decodes), host.policy.k
    drafting = sum(speculates(host.policy, sequence) for sequence in decoding)
    if not drafting:
        return plan
    if host.experience is None:
        return at_width(plan, host, widths(rows, k)[-1])
    context = context_of(sum(sequence.position for sequence in decoding) / len(decoding))
    chosen = choose_width(host.experience, rows=rows, live=len(decoding), drafting=drafting, drafts=k, context=context)
    return dataclasses.replace(at_width(plan, host, chosen), context=context)


def at_width(plan: Plan, host: HostState, chosen: Width) -> Plan:
    """The plan with rounds that draft and verify so many tokens."""
    if not chosen.drafts:
        return plan
    fixed = host.policy.width
    plan = dataclasses.replace(plan, drafts=chosen.drafts, width=fixed if isinstance(fixed, int) else chosen.drafts)
    if host.experience is None or chosen.tokens == len(plan.decodes) * (1 + chosen.drafts):
        return plan
    return dataclasses.replace(plan, tokens=chosen.tokens, chance=host.experience.calibration.chance())


def _take_pages(host: HostState, tokens: int) -> tuple[HostState, dict[str, tuple[int, ...]]]:
    """Gives every decoding request pages for `tokens` more, preempting the newest if need be.

    Returns:
      The new state, and the pages that each request, by id, was given.
    """
    new_pages: dict[str, tuple[int, ...]] = {}
    for sequence in host.running:
        end = min(sequence.position + tokens, sequence.request.longest)
        needed = pages_for(end, host.pool.page_size) - len(sequence.pages)
        if needed <= 0 or not sequence.decoding:
            continue
        while needed > host.pool.available and sequence.id in host.running:
            newest = host.running.last.id
            host = preempt(host, newest)
            new_pages.pop(newest, None)
        if sequence.id in host.running:
            pool, fresh = allocate(host.pool, needed)
            sequence = dataclasses.replace(sequence, pages=sequence.pages.extend(fresh))
            host = dataclasses.replace(host, pool=pool, running=host.running.replace(sequence.id, sequence))
            new_pages[sequence.id] = fresh
    return host, new_pages


def take_chunks(host: HostState) -> tuple[HostState, list[Chunk], int]:
    """The prompts' next pieces, oldest request first.

    Returns:
      The state with the pieces' slots opened, the pieces, and their common padded width: a quarter of
      `prefill_chunk`, half of it or all, after the first piece. So few widths keep the number of compiled
      programs small.
    """
    chunks: list[Chunk] = []
    policy, budget = host.policy, host.policy.prefill_chunk
    narrow = -(-budget // 4)
    width = narrow
    for sequence in host.running:
        if sequence.position >= sequence.to_run:
            continue
        stop = min(sequence.position + budget, sequence.to_run)
        # A piece ends where the state is to be kept.
        marks = [pages * host.pool.page_size for pages in sequence.saves]
        stop = min([stop, *(mark for mark in marks if mark > sequence.position)])
        length = stop - sequence.position
        if chunks and (length > width or width * bucket(len(chunks) + 1, 1, policy.max_slots) > budget):
            break
        width = max(width, bucket(length, narrow, budget))
        host, save = _room_to_save(host) if stop in marks else (host, None)
        last, following = stop == sequence.to_run, sequence.following(sequence.position, stop)
        chunks.append(
            Chunk(
                id=sequence.id,
                slot=_slot(sequence),
                tokens=sequence.tokens(sequence.position, stop),
                last=last,
                known_next=sequence.output[-1] if sequence.output else None,
                opening=None if sequence.opened else _opening(policy, sequence),
                save=save,
                logprobs=sequence.request.sampling.logprobs if last and not sequence.output else None,
                following=following,
                prompt_logprobs=sequence.request.sampling.prompt_logprobs if following else None,
                processed=sequence.request.is_processed,
                constraint=None if stop < sequence.to_run or sequence.output else _constraint(sequence),
            )
        )
        opened = dataclasses.replace(sequence, opened=True)
        host = dataclasses.replace(host, running=host.running.replace(sequence.id, opened))
    return host, chunks, width


def _room_to_save(host: HostState) -> tuple[HostState, int | None]:
    """Room for a checkpoint, but not that of one whose request has yet to begin with it."""
    assert host.checkpoints is not None
    pinned = {sequence.load for sequence in host.running if not sequence.opened and sequence.load is not None}
    checkpoints, index = take(host.checkpoints, pinned)
    return dataclasses.replace(host, checkpoints=checkpoints), index


def bucket(count: int, smallest: int, largest: int | None = None) -> int:
    """The least of smallest, 2 * smallest, 4 * smallest, ... and `largest` that holds `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size if largest is None else min(size, largest)


def _opening(policy: Policy, sequence: Sequence) -> Opening:
    return Opening(
        request=sequence.request,
        pages=tuple(sequence.pages),
        position=sequence.position,
        tokens_left=sequence.request.limit - len(sequence.output),
        speculating=speculates(policy, sequence),
        draft_limit=policy.draft_limit,
        load=sequence.load,
        tokens=_all_tokens(sequence) if sequence.request.is_processed else (),
    )


def _all_tokens(sequence: Sequence) -> tuple[int, ...]:
    return sequence.tokens(0, len(sequence.request.prompt) + len(sequence.output))


def _constraint(sequence: Sequence) -> Constraint | None:
    request = sequence.request
    return None if request.sampling.structured_outputs is None else Constraint(request, sequence.output)


def constraints_of(rows: Sequenced[Chunk | Decode | None]) -> list[Constraint | None] | None:
    """The rows' structured outputs; None where no row has any."""
    found = [None if row is None else row.constraint for row in rows]
    return found if any(each is not None for each in found) else None


def needs_processors(rows: Sequenced[Chunk | Decode | None]) -> bool:
    """Whether some row's request needs logits processors, for which there is a program of its own."""
    return any(row is not None and row.processed for row in rows)


def _padded(rows: list, max_slots: int) -> tuple:
    """The rows, with empty ones up to a bucket's size; none if there are none."""
    return () if not rows else (*rows, *[None] * (bucket(len(rows), 1, max_slots) - len(rows)))


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, f"request {sequence.id!r} has no slot"
    return sequence.slot


def _check_pages(host: HostState) -> None:
    """Before anything is written: no page is lost, none that is written is anybody else's."""
    size, policy = host.pool.page_size, host.policy
    most = max(policy.prefill_chunk, policy.rounds_per_step * (1 + policy.k))
    check_pages_counted(host.pool)
    check_pages_exclusive(
        host.pool,
        {s.id: s.pages[s.position // size : pages_for(s.position + most, size)] for s in host.running},
    )
