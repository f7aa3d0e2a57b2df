"""Immutable containers for the host's state: a change costs the same however much they hold.

A step must not become slower with the length of the queue, of a context or of an output, and every state
from before must stay as it was. Tuples would be copied whole at each change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import immutables

T = TypeVar("T")


class Log(Sequence[T]):
    """A sequence that grows at its end. `extend` gives a new log; this one stays as it is.

    Logs that grew out of each other share one list: each sees its first `len` items. Only the longest of
    them can be extended in place, since the list ends where it does; another one copies what it sees.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: Iterable[T] = ()):
        self._items = list(items)
        self._length = len(self._items)

    def extend(self, items: Iterable[T]) -> Log[T]:
        """This log with more items after it; amortised, at the cost of the new ones."""
        longer: Log[T] = Log.__new__(Log)
        longer._items = self._items if len(self._items) == self._length else self._items[: self._length]
        longer._items.extend(items)
        longer._length = len(longer._items)
        return longer

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return tuple(self._items[start:stop:step]) if step > 0 else tuple(self)[index]
        if not -self._length <= index < self._length:
            raise IndexError(f"item {index} of a log of {self._length}")
        return self._items[index % self._length]

    def __iter__(self) -> Iterator[T]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Log | tuple):
            return len(self) == len(other) and self[:] == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self[:])

    def __repr__(self) -> str:
        return f"Log({list(self[:])!r})" if self._length <= 16 else f"Log(<{self._length} items>)"


class Queue(Generic[T]):
    """Values in an order, each under a key; every change gives a new queue and leaves this one as it is.

    Adding at either end, replacing and removing by key, and finding take logarithmic time. Iterating yields
    the values in order.
    """

    __slots__ = ("_first", "_places", "_stop", "_values")

    def __init__(self, items: Iterable[tuple[Any, T]] = ()):
        """The values of (key, value) pairs, in their order."""
        pairs = list(items)
        self._places = immutables.Map({key: place for place, (key, _) in enumerate(pairs)})
        self._values = immutables.Map(dict(enumerate(pairs)))
        self._first, self._stop = 0, len(pairs)

    def _with(self, places: immutables.Map, values: immutables.Map, first: int, stop: int) -> Queue[T]:
        queue: Queue[T] = Queue.__new__(Queue)
        queue._places, queue._values, queue._first, queue._stop = places, values, first, stop
        return queue

    def append(self, key: Any, value: T) -> Queue[T]:
        """With a value at the end, under a key that is not taken."""
        assert key not in self._places, f"key {key!r} is taken"
        places, values = self._places.set(key, self._stop), self._values.set(self._stop, (key, value))
        return self._with(places, values, self._first, self._stop + 1)

    def prepend(self, key: Any, value: T) -> Queue[T]:
        """With a value at the front, under a key that is not taken."""
        assert key not in self._places, f"key {key!r} is taken"
        first = self._first - 1
        return self._with(self._places.set(key, first), self._values.set(first, (key, value)), first, self._stop)

    def replace(self, key: Any, value: T) -> Queue[T]:
        """With another value in the place of the one under `key`. Raises KeyError if there is none."""
        values = self._values.set(self._places[key], (key, value))
        return self._with(self._places, values, self._first, self._stop)

    def replace_all(self, values: Iterable[tuple[Any, T]]) -> Queue[T]:
        """The same for many (key, value) pairs at once."""
        changed = self._values.mutate()
        for key, value in values:
            changed[self._places[key]] = (key, value)
        return self._with(self._places, changed.finish(), self._first, self._stop)

    def remove(self, key: Any) -> Queue[T]:
        """Without the value under `key`. Raises KeyError if there is none."""
        values = self._values.delete(self._places[key])
        first, stop = self._first, self._stop
        if not values:
            first = stop
        while first < stop and first not in values:
            first += 1
        while first < stop and stop - 1 not in values:
            stop -= 1
        return self._with(self._places.delete(key), values, first, stop)

    def get(self, key: Any) -> T | None:
        """The value under `key`, if there is one."""
        place = self._places.get(key)
        return None if place is None else self._values[place][1]

    @property
    def first(self) -> T:
        """The value at the front. Raises IndexError if the queue is empty."""
        if not self._values:
            raise IndexError("the queue is empty")
        return self._values[self._first][1]

    @property
    def last(self) -> T:
        """The value at the end. Raises IndexError if the queue is empty."""
        if not self._values:
            raise IndexError("the queue is empty")
        return self._values[self._stop - 1][1]

    def head(self, places: int) -> Iterator[T]:
        """The values at the front, looking through so many places at most, some of which may be empty by now."""
        for place in range(self._first, min(self._first + places, self._stop)):
            if place in self._values:
                yield self._values[place][1]

    def items(self) -> Iterator[tuple[Any, T]]:
        """(key, value) pairs in order."""
        # Most queues have no gaps, and then their places need no sorting.
        has_gaps = len(self._values) < self._stop - self._first
        places = sorted(self._values) if has_gaps else range(self._first, self._stop)
        return map(self._values.__getitem__, places)

    def __contains__(self, key: Any) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self.items())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Queue):
            return len(self) == len(other) and list(self.items()) == list(other.items())
        return NotImplemented

    def __repr__(self) -> str:
        return f"Queue(<{len(self)} values>)"
