"""Who gets a slot: requests leave the queue in the order they came, as soon as a slot and pages are there.

One is admitted when its whole prompt has pages, so requests that prefill never wait for each other's pages. One whose
prompt another is just running lets those behind it pass until it can share that prompt's pages.
"""

from __future__ import annotations

import dataclasses

from dflash_jax.engine.checkpoints import deepest, touch
from dflash_jax.engine.host import HostState, Refusal, shares_pages
from dflash_jax.engine.pages import allocate, lookup, pages_for, share
from dflash_jax.engine.sequence import Sequence


def admit(host: HostState) -> HostState:
    """Moves requests from the queue into free slots while their prompts have pages.

    With `prefix_cache`, full pages of a known prefix are shared; at least one token is left to run. Those of a hybrid
    target are shared up to the deepest page with a checkpoint.
    """
    free_slots = _free_slots(host) if host.waiting else []
    while host.waiting and free_slots and not _is_refused(host):
        sequence, pool = _next(host), host.pool
        if sequence is None:
            break
        full = (sequence.to_run - 1) // pool.page_size if host.policy.prefix_cache else 0
        sequence = sequence.hashed(full, pool.page_size)
        wanted = min(full, sequence.shareable // pool.page_size)
        known = lookup(pool, sequence.hashes[:wanted])
        host, resumption = _resume_from(host, sequence, len(known))
        found, known = len(known), known[: resumption.pages]
        pool = share(pool, known)
        needed = pages_for(sequence.to_run, pool.page_size) - len(known)
        # A page for each running request's next tokens stays untouched, or a newcomer would be
        # admitted only to be preempted in the next round.
        if pool.available < needed + len(host.running):
            missing = None if found == wanted else sequence.hashes[found]
            refusal = Refusal(sequence.request, pool.releases, missing, host.checkpoints)
            # What was hashed is kept for the next time.
            host = dataclasses.replace(host, waiting=host.waiting.replace(sequence.id, sequence), refusal=refusal)
            break
        pool, fresh = allocate(pool, needed)
        saved = len(known) * pool.page_size
        pool = dataclasses.replace(pool, hits=pool.hits + len(known), misses=pool.misses + wanted - len(known))
        counters = host.counters.plus(prefix_tokens_saved=saved)
        if host.checkpoints is not None and found:
            again = (found - len(known)) * pool.page_size
            hit = int(len(known) > 0)
            counters = counters.plus(checkpoint_hits=hit, checkpoint_misses=1 - hit, tokens_run_again=again)
        sequence = dataclasses.replace(
            sequence,
            slot=free_slots.pop(0),
            pages=sequence.pages.extend(known + fresh),
            position=saved,
            load=resumption.load,
            saves=_saves(host, sequence, resumption.pages, found, full),
            published=len(known),
            cached_tokens=sequence.cached_tokens + saved,
        )
        host = dataclasses.replace(
            host,
            waiting=host.waiting.remove(sequence.id),
            running=host.running.append(sequence.id, sequence),
            pool=pool,
            counters=counters,
            refusal=None,
        )
    return host


_LOOKED_THROUGH = 64
"""Places of the queue, at most, in which one is looked for that need not wait for another's prompt."""


def _next(host: HostState) -> Sequence | None:
    """The first request in the queue that need not wait for a prompt that is being run."""
    running = [each for each in host.running if not each.decoding and shares_pages(host.policy, each)]
    keeps_nothing = host.checkpoints is not None and not host.checkpoints.capacity
    if not running or keeps_nothing:
        return host.waiting.first
    few = host.waiting.head(_LOOKED_THROUGH)
    return next((each for each in few if not any(_is_running(other, each, host) for other in running)), None)


def _is_running(other: Sequence, sequence: Sequence, host: HostState) -> bool:
    """Whether another request runs the very prompt of a sequence, and pages of it are yet to come."""
    pages = min(len(other.request.prompt) - 1, sequence.shareable) // host.pool.page_size
    return other.published < pages and other.request.prompt == sequence.request.prompt


def _is_refused(host: HostState) -> bool:
    """Whether the first request in the queue was refused, and nothing has happened since that could admit it.

    Looking its pages up takes longer the longer its prompt is, so this is not done at every step.
    """
    refusal = host.refusal
    return (
        refusal is not None
        and refusal.request is host.waiting.first.request
        and refusal.releases == host.pool.releases
        and refusal.missing not in host.pool.page_of
        and refusal.checkpoints is host.checkpoints
    )


@dataclasses.dataclass(frozen=True)
class _Resumption:
    """Where a prompt is taken up: after how many known pages, and from which checkpoint."""

    pages: int
    load: int | None = None


def _resume_from(host: HostState, sequence: Sequence, known: int) -> tuple[HostState, _Resumption]:
    """How many of a sequence's known pages can be used; the checkpoint at their end becomes the most recently used."""
    if host.checkpoints is None or known == 0:
        return host, _Resumption(known)
    pages, checkpoint = deepest(host.checkpoints, sequence.hashes[:known])
    if checkpoint is None:
        return host, _Resumption(0)
    used = touch(host.checkpoints, sequence.hashes[pages - 1])
    return dataclasses.replace(host, checkpoints=used), _Resumption(pages, checkpoint.index)


def _saves(host: HostState, sequence: Sequence, shared: int, known: int, full: int) -> tuple[int, ...]:
    """Numbers of pages at whose end a checkpoint will be of use.

    The end of the last full page of the prompt, for whoever asks the same again or goes on from here, and the end of
    the pages that were known: there this prompt departs from another, and more may do so.
    """
    if host.checkpoints is None or not shares_pages(host.policy, sequence):
        return ()
    return tuple(sorted({pages for pages in (known, full) if pages > shared}))


def _free_slots(host: HostState) -> list[int]:
    taken = {sequence.slot for sequence in host.running}
    return [slot for slot in range(host.policy.max_slots) if slot not in taken]
