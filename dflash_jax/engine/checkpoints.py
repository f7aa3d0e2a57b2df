"""The host's account of checkpoints: states of a hybrid target kept at the ends of pages.

A page's keys and values are not all that a hybrid target knows of a prefix: the recurrent state at the page's end
belongs to it. A prefix-cache hit therefore goes as deep as the deepest page with a checkpoint. There are far fewer
checkpoints than pages, so they are kept where they are most useful: at the ends of prompts, and where the prompt of
one request departs from that of another. Nothing is modified in place: each function returns a new pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from dflash_jax.engine.containers import Queue
from dflash_jax.errors import InvariantError


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A state on the device.

    Attributes:
      index: where it is.
      tokens: how many tokens were folded into it.
    """

    index: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class CheckpointPool:
    """See the module's docstring.

    Attributes:
      capacity: checkpoints on the device.
      free: those that hold nothing.
      known: the others by the hash of their page, least recently used first.
      evictions: checkpoints whose room was needed.
    """

    capacity: int
    free: Queue[int]
    known: Queue[Checkpoint] = dataclasses.field(default_factory=Queue)
    evictions: int = 0

    def __repr__(self) -> str:
        return f"CheckpointPool({self.capacity} checkpoints: {len(self.known)} known, {len(self.free)} free)"


def empty_checkpoints(capacity: int) -> CheckpointPool:
    """A pool with nothing in it."""
    return CheckpointPool(capacity, Queue((index, index) for index in range(capacity)))


def deepest(pool: CheckpointPool, hashes: Sequence[bytes]) -> tuple[int, Checkpoint | None]:
    """The last of some consecutive pages that has a checkpoint: how many pages it ends, and the checkpoint."""
    for pages in range(len(hashes), 0, -1):
        found = pool.known.get(hashes[pages - 1])
        if found is not None:
            return pages, found
    return 0, None


def touch(pool: CheckpointPool, key: bytes) -> CheckpointPool:
    """The pool with a known checkpoint as the most recently used."""
    checkpoint = pool.known.get(key)
    assert checkpoint is not None, "only a known checkpoint can be used"
    return dataclasses.replace(pool, known=pool.known.remove(key).append(key, checkpoint))


def take(pool: CheckpointPool, pinned: Collection[int]) -> tuple[CheckpointPool, int | None]:
    """Room for a new checkpoint, if need be the least recently used one's.

    Args:
      pool: the account.
      pinned: checkpoints that are about to be read.

    Returns:
      The new pool and where there is room; None if every checkpoint is pinned or being written.
    """
    if pool.free:
        index = pool.free.first
        return dataclasses.replace(pool, free=pool.free.remove(index)), index
    for key, checkpoint in pool.known.items():
        if checkpoint.index not in pinned:
            known = pool.known.remove(key)
            return dataclasses.replace(pool, known=known, evictions=pool.evictions + 1), checkpoint.index
    return pool, None


def keep(pool: CheckpointPool, key: bytes, checkpoint: Checkpoint) -> CheckpointPool:
    """Makes a checkpoint that was taken and written findable; a page that has one already keeps it."""
    if key in pool.known:
        return give_back(pool, checkpoint.index)
    return dataclasses.replace(pool, known=pool.known.append(key, checkpoint))


def give_back(pool: CheckpointPool, index: int) -> CheckpointPool:
    """Room that was taken and is not needed."""
    return dataclasses.replace(pool, free=pool.free.append(index, index))


def check_checkpoints(pool: CheckpointPool) -> None:
    """`checkpoints_conserved`: every checkpoint is free or known, and once.

    Between steps, that is: within one, others are being written.

    Raises:
      InvariantError: it does not hold.
    """
    places = sorted([*pool.free, *(checkpoint.index for checkpoint in pool.known)])
    if places != list(range(pool.capacity)):
        raise InvariantError(
            f"checkpoints_conserved: the free and the known checkpoints are {places}, of {pool.capacity} in all"
        )
