"""Who runs next: pure functions of the host's state.

Requests are served in the order they came. One is admitted when a slot is free and its whole prompt
has pages, so requests that prefill never wait for each other's pages; pages for what it produces come
round by round. When they run out the newest request gives its pages back and waits at the head of the
queue: the oldest always advances, so everything finishes.
"""

from __future__ import annotations

import dataclasses

from dflash_jax.engine.pages import PagePool, allocate, lookup, page_hashes, publish, release, share
from dflash_jax.engine.request import Progress


@dataclasses.dataclass(frozen=True)
class HostState:
    """Everything the engine knows that is not on the device.

    Attributes:
      waiting: requests without a slot, first to be served first.
      running: requests with a slot, oldest admission first.
      pool: the account of pages.
      max_slots: slots on the device.
      tokens_saved: prompt tokens that the prefix cache made unnecessary to run.
      preemptions: times a request gave its pages back.
      fallbacks: requests that stopped speculating.
    """

    waiting: tuple[Progress, ...]
    running: tuple[Progress, ...]
    pool: PagePool
    max_slots: int
    tokens_saved: int = 0
    preemptions: int = 0
    fallbacks: int = 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a prompt to run now."""

    slot: int
    tokens: tuple[int, ...]
    last: bool
    known_next: int | None


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // page_size)


def replace_running(host: HostState, progress: Progress) -> HostState:
    """The state with one running request's progress updated."""
    running = tuple(progress if p.slot == progress.slot else p for p in host.running)
    return dataclasses.replace(host, running=running)


def admit(host: HostState, *, prefix_cache: bool) -> tuple[HostState, tuple[Progress, ...]]:
    """Moves requests from the queue into free slots while their prompts have pages.

    With `prefix_cache`, full pages of a known prefix are shared; at least one token is left to run.
    """
    admitted = []
    while host.waiting and len(host.running) < host.max_slots:
        progress, pool = host.waiting[0], host.pool
        tokens = progress.to_run
        hashes = page_hashes(tokens[:-1], pool.page_size) if prefix_cache else ()
        known = lookup(pool, hashes)
        pool = share(pool, known)
        needed = pages_for(len(tokens), pool.page_size) - len(known)
        # A page for each running request's next tokens stays untouched, or a newcomer would be
        # admitted only to be preempted in the next round.
        if host.running and pool.available < needed + len(host.running):
            break
        if pool.available < needed:
            break
        pool, fresh = allocate(pool, needed)
        computed = len(known) * pool.page_size
        pool = dataclasses.replace(pool, hits=pool.hits + len(known), misses=pool.misses + len(hashes) - len(known))
        taken = {p.slot for p in host.running}
        slot = next(slot for slot in range(host.max_slots) if slot not in taken)
        progress = dataclasses.replace(
            progress,
            slot=slot,
            pages=known + fresh,
            computed=computed,
            shared=len(known),
            cached_tokens=progress.cached_tokens + computed,
        )
        host = dataclasses.replace(
            host,
            waiting=host.waiting[1:],
            running=(*host.running, progress),
            pool=pool,
            tokens_saved=host.tokens_saved + computed,
        )
        admitted.append(progress)
    return host, tuple(admitted)


def reserve(host: HostState, tokens_per_step: int) -> tuple[HostState, tuple[Progress, ...]]:
    """Gives every decoding request pages for what the next step may commit, preempting the newest if need be.

    Returns:
      The new state and the requests that were preempted, as they were.
    """
    preempted = []
    index = 0
    while index < len(host.running):
        progress = host.running[index]
        if not progress.decoding:
            index += 1
            continue
        end = min(progress.computed + tokens_per_step, progress.request.longest)
        needed = pages_for(end, host.pool.page_size) - len(progress.pages)
        if needed > host.pool.available:
            newest = host.running[-1]
            preempted.append(newest)
            host = preempt(host, newest)
            continue
        if needed > 0:
            pool, fresh = allocate(host.pool, needed)
            host = dataclasses.replace(host, pool=pool)
            host = replace_running(host, dataclasses.replace(progress, pages=progress.pages + fresh))
        index += 1
    return host, tuple(preempted)


def preempt(host: HostState, progress: Progress) -> HostState:
    """Takes a running request's pages and puts it at the head of the queue; what it produced is kept."""
    host = remove(host, progress)
    waiting = dataclasses.replace(
        progress, slot=None, pages=(), computed=0, shared=0, preemptions=progress.preemptions + 1
    )
    return dataclasses.replace(host, waiting=(waiting, *host.waiting), preemptions=host.preemptions + 1)


def remove(host: HostState, progress: Progress) -> HostState:
    """Takes a running request out and gives its pages back."""
    return dataclasses.replace(
        host,
        running=tuple(p for p in host.running if p.slot != progress.slot),
        pool=release(host.pool, progress.pages),
    )


def chunks(host: HostState, *, budget: int) -> tuple[tuple[Chunk, ...], int]:
    """The prompts' next pieces, oldest request first.

    Args:
      host: the host's state.
      budget: tokens to run at once, padding included.

    Returns:
      The chunks and their common padded width: a quarter of the budget, half of it or all, after the first
      piece. So few widths keep the number of compiled programs small.
    """
    chosen: list[Chunk] = []
    narrow = -(-budget // 4)
    width = narrow
    for progress in host.running:
        if progress.computed >= len(progress.to_run) or progress.slot is None:
            continue
        tokens = progress.to_run[progress.computed : progress.computed + budget]
        if chosen and (len(tokens) > width or width * bucket(len(chosen) + 1, 1, host.max_slots) > budget):
            break
        width = max(width, bucket(len(tokens), narrow, budget))
        last = progress.computed + len(tokens) == len(progress.to_run)
        chosen.append(Chunk(progress.slot, tokens, last, progress.emitted[-1] if progress.emitted else None))
    return tuple(chosen), width


def bucket(count: int, smallest: int, largest: int) -> int:
    """The least of smallest, 2 * smallest, 4 * smallest, ... and `largest` that holds `count`."""
    size = smallest
    while size < count:
        size *= 2
    return min(size, largest)


def publish_pages(host: HostState, progress: Progress) -> HostState:
    """Makes a running request's newly full pages findable for the prefix cache."""
    size = host.pool.page_size
    full = progress.computed // size
    if full <= progress.shared:
        return host
    hashes = page_hashes((progress.request.prompt + progress.emitted)[: full * size], size)
    pool = publish(host.pool, progress.pages[progress.shared : full], hashes[progress.shared :])
    host = dataclasses.replace(host, pool=pool)
    return replace_running(host, dataclasses.replace(progress, shared=full))


def shift_times(host: HostState, seconds: float) -> HostState:
    """The state as on a clock that is that much ahead."""

    def shift(progress: Progress) -> Progress:
        times = {name: getattr(progress, name) for name in ("arrived", "first_token", "last_token")}
        return dataclasses.replace(progress, **{name: t + seconds for name, t in times.items() if t is not None})

    waiting, running = (tuple(map(shift, group)) for group in (host.waiting, host.running))
    return dataclasses.replace(host, waiting=waiting, running=running)
