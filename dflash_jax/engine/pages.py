"""The host's account of the page pool: who holds which page, and which pages can be shared.

A page is free, or referenced by one or more requests, or idle: unreferenced but still holding the
tokens of a known prefix, until somebody needs the room. One account serves target and draft, since
physical page n holds the same tokens in both pools. Nothing is modified in place: each function
returns a new pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dflash_jax.errors import InvariantError

_ROOT = b""


@dataclasses.dataclass(frozen=True)
class PagePool:
    """See the module's docstring.

    Attributes:
      num_pages, page_size: of the pools on the device.
      references: requests that hold each page.
      free: pages that hold nothing.
      page_of: prefix hash to the page that holds its last tokens.
      hash_of: the inverse.
      idle: known pages nobody references, least recently used first.
      hits, misses: pages found and not found by `lookup`.
      evictions: idle pages whose room was needed.
    """

    num_pages: int
    page_size: int
    references: np.ndarray
    free: np.ndarray
    page_of: Mapping[bytes, int] = dataclasses.field(default_factory=dict)
    hash_of: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    idle: tuple[int, ...] = ()
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    def __post_init__(self) -> None:
        for array in (self.references, self.free):
            array.setflags(write=False)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self.free) + len(self.idle)


def empty_pool(num_pages: int, page_size: int) -> PagePool:
    """A pool with every page free."""
    pages = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
    return PagePool(num_pages, page_size, references=np.zeros(num_pages, np.int32), free=pages)


def page_hashes(tokens: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """One hash for each full page of tokens; it stands for the page and everything before it."""
    hashes, parent = [], _ROOT
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = np.asarray(tokens[start : start + page_size], np.int32).tobytes()
        parent = hashlib.sha256(parent + page).digest()
        hashes.append(parent)
    return tuple(hashes)


def lookup(pool: PagePool, hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Pages of the longest known prefix of `hashes`."""
    pages = []
    for key in hashes:
        if key not in pool.page_of:
            break
        pages.append(pool.page_of[key])
    return tuple(pages)


def share(pool: PagePool, pages: Sequence[int]) -> PagePool:
    """One more request references the pages."""
    references = pool.references.copy()
    references[list(pages)] += 1
    taken = set(pages)
    return dataclasses.replace(pool, references=references, idle=tuple(page for page in pool.idle if page not in taken))


def allocate(pool: PagePool, count: int) -> tuple[PagePool, tuple[int, ...]]:
    """Gives `count` pages to one request; idle pages lose their content when no free ones are left.

    The caller has made sure that `pool.available` suffices.
    """
    if count == 0:
        return pool, ()
    evicted = pool.idle[: max(0, count - len(pool.free))]
    fresh = tuple(pool.free[max(0, len(pool.free) - count) :][::-1].tolist())
    pages = fresh + evicted
    assert len(pages) == count, f"{count} pages asked of a pool with {pool.available}"
    references = pool.references.copy()
    references[list(pages)] = 1
    pool = dataclasses.replace(
        pool,
        references=references,
        free=pool.free[: len(pool.free) - len(fresh)],
        idle=pool.idle[len(evicted) :],
        evictions=pool.evictions + len(evicted),
    )
    if evicted:
        gone = {pool.hash_of[page] for page in evicted}
        pool = dataclasses.replace(
            pool,
            page_of={key: page for key, page in pool.page_of.items() if key not in gone},
            hash_of={page: key for page, key in pool.hash_of.items() if key not in gone},
        )
    return pool, pages


def release(pool: PagePool, pages: Sequence[int]) -> PagePool:
    """One request lets go of its pages, given in order of position.

    Pages nobody references any more go idle if their content is known, last position first, so that
    a prefix outlives what follows it.
    """
    references = pool.references.copy()
    free: list[int] = []
    idle: list[int] = []
    for page in reversed(pages):
        references[page] -= 1
        if references[page] == 0:
            (idle if page in pool.hash_of else free).append(page)
    return dataclasses.replace(
        pool,
        references=references,
        free=np.concatenate([pool.free, np.array(free, np.int32)]),
        idle=(*pool.idle, *idle),
    )


def publish(pool: PagePool, pages: Iterable[int], hashes: Iterable[bytes]) -> PagePool:
    """Makes full pages findable; content that is known already keeps the page it is known by."""
    new = {key: page for key, page in zip(hashes, pages, strict=True) if key not in pool.page_of}
    if not new:
        return pool
    return dataclasses.replace(
        pool,
        page_of={**pool.page_of, **new},
        hash_of={**pool.hash_of, **{page: key for key, page in new.items()}},
    )


def check_pages_conserved(pool: PagePool, held: Iterable[Sequence[int]]) -> None:
    """`pages_conserved`: free + idle + referenced are all pages, and references are what requests hold.

    Args:
      pool: the account.
      held: the pages of each request in flight.

    Raises:
      InvariantError: it does not hold.
    """
    pages = np.fromiter((page for pages in held for page in pages), np.int64)
    counted = np.bincount(pages, minlength=pool.num_pages)
    if np.any(counted != pool.references):
        wrong = int(np.argmax(counted != pool.references))
        raise InvariantError(
            f"pages_conserved: page {wrong} is held by {counted[wrong]} requests but counted as "
            f"{pool.references[wrong]}"
        )
    unheld = np.zeros(pool.num_pages, bool)
    unheld[pool.free] = True
    unheld[list(pool.idle)] = True
    if unheld.sum() != len(pool.free) + len(pool.idle) or np.any(unheld != (counted == 0)):
        raise InvariantError(
            f"pages_conserved: {len(pool.free)} free and {len(pool.idle)} idle pages are not the "
            f"{int(np.sum(counted == 0))} that nobody references"
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
            if pool.references[page] != 1:
                raise InvariantError(
                    f"pages_exclusive: request {request_id!r} is about to write page {page}, "
                    f"which {pool.references[page]} requests hold"
                )
