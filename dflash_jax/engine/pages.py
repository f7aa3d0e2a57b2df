"""The host's account of the page pool: who holds which page, and which pages can be shared.

A page is free, or referenced by one or more requests, or idle: unreferenced but still holding the
tokens of a known prefix, until somebody needs the room. One account serves target and draft, since
physical page n holds the same tokens in both pools. Nothing is modified in place: each function
returns a new pool, at a cost that depends on the pages it concerns and not on the size of the pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import immutables
import numpy as np

from dflash_jax.engine.containers import Queue
from dflash_jax.errors import InvariantError

_ROOT = b""
_NONE: immutables.Map[Any, Any] = immutables.Map()


@dataclasses.dataclass(frozen=True)
class PagePool:
    """See the module's docstring.

    Attributes:
      num_pages, page_size: of the pools on the device.
      free: a stack of the pages that hold nothing, from 0 to its top.
      references: how many requests hold a page, of pages that are held.
      page_of: prefix hash to the page that holds its last tokens.
      hash_of: the inverse.
      idle: known pages that no request references, least recently used first.
      hits, misses: pages found and not found by admissions.
      evictions: idle pages whose room was needed.
      releases: times that a request let go of its pages.
    """

    num_pages: int
    page_size: int
    free: immutables.Map[int, int]
    references: immutables.Map[int, int] = _NONE
    page_of: immutables.Map[bytes, int] = _NONE
    hash_of: immutables.Map[int, bytes] = _NONE
    idle: Queue[int] = dataclasses.field(default_factory=Queue)
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    releases: int = 0

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self.free) + len(self.idle)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The pages that hold nothing."""
        return tuple(self.free.values())

    def __repr__(self) -> str:
        return (
            f"PagePool({self.num_pages} pages of {self.page_size} tokens: {len(self.references)} referenced, "
            f"{len(self.idle)} idle, {len(self.free)} free)"
        )


def empty_pool(num_pages: int, page_size: int) -> PagePool:
    """A pool with every page free."""
    return PagePool(num_pages, page_size, immutables.Map({at: num_pages - 1 - at for at in range(num_pages)}))


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // page_size)


def page_hash(parent: bytes | None, tokens: Sequence[int]) -> bytes:
    """The hash of a full page of tokens and everything before it.

    Args:
      parent: the hash of the page before it; None for a first page.
      tokens: the page's.
    """
    return hashlib.sha256((_ROOT if parent is None else parent) + np.asarray(tokens, np.int32).tobytes()).digest()


def page_hashes(tokens: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """One hash for each full page of tokens; it stands for the page and everything before it."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        hashes.append(page_hash(hashes[-1] if hashes else None, tokens[start : start + page_size]))
    return tuple(hashes)


def lookup(pool: PagePool, hashes: Iterable[bytes]) -> tuple[int, ...]:
    """Pages of the longest known prefix of `hashes`."""
    pages = []
    for key in hashes:
        if key not in pool.page_of:
            break
        pages.append(pool.page_of[key])
    return tuple(pages)


def share(pool: PagePool, pages: Sequence[int]) -> PagePool:
    """One more request references the pages."""
    references, idle = pool.references, pool.idle
    for page in pages:
        references = references.set(page, references.get(page, 0) + 1)
        if page in idle:
            idle = idle.remove(page)
    return dataclasses.replace(pool, references=references, idle=idle)


def allocate(pool: PagePool, count: int) -> tuple[PagePool, tuple[int, ...]]:
    """Gives `count` pages to one request; idle pages lose their content when no free ones are left.

    The caller has made sure that `pool.available` suffices.
    """
    assert count <= pool.available, f"{count} pages asked of a pool with {pool.available}"
    pages: list[int] = []
    idle, evictions = pool.idle, 0
    free, references = pool.free.mutate(), pool.references.mutate()
    page_of, hash_of = pool.page_of.mutate(), pool.hash_of.mutate()
    for _ in range(count):
        if len(free):
            page = free.pop(len(free) - 1)
        else:
            page, evictions = idle.first, evictions + 1
            idle = idle.remove(page)
            del page_of[hash_of.pop(page)]
        references[page] = 1
        pages.append(page)
    pool = dataclasses.replace(
        pool,
        free=free.finish(),
        references=references.finish(),
        page_of=page_of.finish(),
        hash_of=hash_of.finish(),
        idle=idle,
        evictions=pool.evictions + evictions,
    )
    return pool, tuple(pages)


def release(pool: PagePool, pages: Sequence[int]) -> PagePool:
    """One request lets go of its pages, given in order of position.

    Pages that no request references any more become idle if their content is known, last position first, so that
    a prefix outlives what follows it.
    """
    idle = pool.idle
    free, references = pool.free.mutate(), pool.references.mutate()
    for page in reversed(pages):
        left = references[page] - 1
        if left == 0:
            del references[page]
        else:
            references[page] = left
        if left == 0 and page in pool.hash_of:
            idle = idle.append(page, page)
        elif left == 0:
            free[len(free)] = page
    return dataclasses.replace(
        pool, free=free.finish(), references=references.finish(), idle=idle, releases=pool.releases + 1
    )


def publish(pool: PagePool, pages: Iterable[int], hashes: Iterable[bytes]) -> PagePool:
    """Makes full pages findable; content that is known already keeps the page it is known by."""
    page_of, hash_of = pool.page_of, pool.hash_of
    for key, page in zip(hashes, pages, strict=True):
        if key not in page_of:
            page_of, hash_of = page_of.set(key, page), hash_of.set(page, key)
    return dataclasses.replace(pool, page_of=page_of, hash_of=hash_of)


def check_pages_counted(pool: PagePool) -> None:
    """`pages_conserved`, by the numbers: free, idle and referenced pages are as many as there are pages.

    Takes the same time however many pages there are, so every step can ask; `check_pages_conserved` looks at each.

    Raises:
      InvariantError: it does not hold.
    """
    if len(pool.free) + len(pool.idle) + len(pool.references) != pool.num_pages:
        raise InvariantError(
            f"pages_conserved: {len(pool.free)} free, {len(pool.idle)} idle and {len(pool.references)} referenced "
            f"pages are not the pool's {pool.num_pages}"
        )


def check_pages_conserved(pool: PagePool, held: Iterable[Sequence[int]]) -> None:
    """`pages_conserved`, page by page: each is free, idle or held, and references are what requests hold.

    Args:
      pool: the account.
      held: the pages of each request in flight.

    Raises:
      InvariantError: it does not hold.
    """
    counted = Counter(page for pages in held for page in pages)
    for page in counted.keys() | pool.references.keys():
        if counted[page] != pool.references.get(page, 0):
            raise InvariantError(
                f"pages_conserved: page {page} is held by {counted[page]} requests but counted as "
                f"{pool.references.get(page, 0)}"
            )
    places = Counter([*pool.free.values(), *pool.idle, *counted])
    if set(places) != set(range(pool.num_pages)) or max(places.values(), default=1) > 1:
        wrong = next(page for page in range(pool.num_pages) if places[page] != 1)
        raise InvariantError(
            f"pages_conserved: page {wrong} is {places[wrong]} times among the free, the idle and the held pages; "
            "it must be once"
        )


def check_pages_exclusive(pool: PagePool, written: Mapping[str, Sequence[int]]) -> None:
    """`pages_exclusive`: a page that is written belongs to one request.

    Args:
      pool: the account.
      written: pages that each request, by id, may write to.

    Raises:
      InvariantError: it does not hold.
    """
    for request_id, pages in written.items():
        for page in pages:
            if pool.references.get(page, 0) != 1:
                raise InvariantError(
                    f"pages_exclusive: request {request_id!r} is about to write page {page}, "
                    f"which {pool.references.get(page, 0)} requests hold"
                )
