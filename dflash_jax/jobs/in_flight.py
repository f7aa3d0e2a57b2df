"""The input lines whose answers are on their way, sample by sample."""

from __future__ import annotations

import dataclasses

from dflash_jax.engine import Completion, samples_of
from dflash_jax.jobs.reader import Item


class InFlight:
    """Which line each of the engine's requests is of, and the samples that are there while others are missing."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._samples: dict[str, dict[str, Completion]] = {}

    def __len__(self) -> int:
        """Requests, not lines."""
        return len(self._items)

    def add(self, item: Item) -> None:
        """A line whose samples are all in the engine."""
        for name, _ in samples_of(str(item.id), item.sampling):
            self._items[name] = item

    def finish(self, completion: Completion) -> tuple[Item, Completion] | None:
        """The line of a request that has finished, with its samples as one completion; None if some are missing."""
        item = self._items.pop(completion.id)
        if item.sampling.n == 1:
            return item, completion
        there = self._samples.setdefault(str(item.id), {})
        there[completion.id] = completion
        if len(there) < item.sampling.n:
            return None
        del self._samples[str(item.id)]
        first, *others = (there[name] for name, _ in samples_of(str(item.id), item.sampling))
        return item, dataclasses.replace(first, others=tuple(others))
