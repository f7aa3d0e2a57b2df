"""Where two runs part: the first round in which a request differs, and in which leaf of its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dflash_jax.engine import Engine, EngineState
from dflash_jax.kernels.context import KeyValues

View = dict[str, np.ndarray]
"""What there is to a request after a round: leaves of its state by name."""

_ORDER = ("drafted", "verified", "produced", "slots", "draft_pages", "target_pages", "recurrent")
"""In a round one thing follows from the other in this order, so the first difference is its cause."""


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """A leaf that differs.

    Attributes:
      leaf: its name: `drafted`, `verified` and `produced` of the round, and leaves of the request's state.
      index: of the first number in it that differs; of pages [layer, position, head, channel].
      first, second: the numbers there; None if one of the leaves is shorter.
      largest: difference of all, absolute; None where the shapes differ or a value is not a number.
    """

    leaf: str
    index: tuple[int, ...]
    first: float | int | None
    second: float | int | None
    largest: float | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
      request: whose state differs.
      round: the number of the round, from 1, after which it does; 0 is the prompt.
      leaves: all that differ then, causes before effects.
    """

    request: str
    round: int
    leaves: tuple[LeafDifference, ...]

    @property
    def leaf(self) -> str:
        """The first leaf that differs."""
        return self.leaves[0].leaf

    def __str__(self) -> str:
        first = self.leaves[0]
        where = "after its prompt" if self.round == 0 else f"in round {self.round}"
        more = "" if len(self.leaves) == 1 else f", and {len(self.leaves) - 1} more leaves differ"
        place = f"{first.leaf}{list(first.index)}" if first.index else first.leaf
        return f"request {self.request!r} differs {where}: {place} is {first.first} and {first.second}{more}"


def diff(first: Engine, second: Engine, *, atol: float = 0.0) -> Difference | None:
    """Runs two engines on, beside each other, to the first round after which a request's state differs.

    A request's state is looked at by itself: its slot's entries, the keys and values of its tokens, its recurrent
    state. In which row, slot and pages it lies makes no difference. The engines stay as they are.

    Args:
      first, second: with the same requests.
      atol: numbers that are no further apart count as equal.

    Returns:
      The difference; None if there is none until both have no work left.
    """
    runs = _views(first.fork()), _views(second.fork())
    pending: tuple[dict[tuple[str, int], View], ...] = ({}, {})
    done = [False, False]
    while not all(done):
        for side, run in enumerate(runs):
            found = next(run, None)
            done[side] = found is None
            pending[side].update(found or {})
        both = sorted(pending[0].keys() & pending[1].keys(), key=lambda key: key[1])
        for request, number in both:
            leaves = _differing(pending[0].pop((request, number)), pending[1].pop((request, number)), atol)
            if leaves:
                return Difference(request, number, leaves)
    # A round that only one of them ran.
    for request, number in sorted(pending[0].keys() ^ pending[1].keys(), key=lambda key: key[1]):
        held = pending[0].get((request, number)), pending[1].get((request, number))
        mine, its = (None if view is None else number for view in held)
        rounds = LeafDifference("rounds", (), mine, its, None)
        return Difference(request, number, (rounds,))
    return None


def _views(engine: Engine) -> Iterator[dict[tuple[str, int], View]]:
    """Of each step, the views of the requests that it brought forward, by id and rounds done."""
    engine.host = dataclasses.replace(engine.host, policy=dataclasses.replace(engine.host.policy, rounds_per_step=1))
    while len(engine.host.running) or len(engine.host.waiting):
        before = engine.host
        completions = {update.id: update.completion for update in engine.step()}
        found = {}
        for name, completion in completions.items():
            after = engine.host.find(name)
            held = after if after is not None else before.find(name)
            record: Any = after if completion is None else completion
            if record is None:
                continue
            number = len(record.produced_per_round)
            slot = None if held is None else held.slot
            view = {} if slot is None else request_view(engine.state, slot)
            if number:
                produced = record.produced_per_round[-1]
                output = record.token_ids if completion is not None else record.output
                view["drafted"] = np.asarray(record.drafted_blocks[-1], int)
                view["verified"] = np.asarray(record.verified_per_round[-1], int)
                view["produced"] = np.asarray(output[len(output) - produced :], int)
            found[name, number] = view
        yield found


def request_view(state: EngineState, slot: int) -> View:
    """What a state has of the request in a slot, as arrays by name.

    Pages are read through the block table, one behind the other, up to what the slot counts; so two views are equal
    if the requests' contexts are, whichever pages they are in.
    """
    slots = jax.device_get(state.slots)
    view: View = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(slots):
        name = jax.tree_util.keystr(path)
        if name != ".block_table":
            view[f"slots{name}"] = np.asarray(leaf[slot])
    for name, length in (("target_pages", slots.position[slot]), ("draft_pages", slots.draft_len[slot])):
        pages: KeyValues | None = getattr(state, name)
        if pages is not None:
            size = pages.k.shape[2]
            table = slots.block_table[slot, : -(-int(length) // size)]
            for part in ("k", "v"):
                held = np.asarray(getattr(pages, part)[:, table])
                view[f"{name}.{part}"] = held.reshape(held.shape[0], -1, *held.shape[3:])[:, : int(length)]
    if state.recurrent is not None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.recurrent):
            view[f"recurrent{jax.tree_util.keystr(path)}"] = np.asarray(leaf[:, slot])
    return view


def _differing(first: View, second: View, atol: float) -> tuple[LeafDifference, ...]:
    names = sorted({*first, *second}, key=_rank)
    found = (_leaf_difference(name, first.get(name), second.get(name), atol) for name in names)
    return tuple(difference for difference in found if difference is not None)


def _rank(name: str) -> int:
    return next(at for at, prefix in enumerate(_ORDER) if name.startswith(prefix))


def _leaf_difference(
    name: str, first: np.ndarray | None, second: np.ndarray | None, atol: float
) -> LeafDifference | None:
    if first is None or second is None:
        sizes = [None if leaf is None else leaf.size for leaf in (first, second)]
        return LeafDifference(f"{name}.size", (), sizes[0], sizes[1], None)
    if first.shape != second.shape:
        axis = next((at for at, (a, b) in enumerate(zip(first.shape, second.shape, strict=False)) if a != b), 0)
        return _of_other_lengths(name, first, second, axis)
    wide = [leaf.astype(np.float64) for leaf in (first, second)]
    apart = np.abs(wide[0] - wide[1])
    unequal = ~((apart <= atol) | (np.isnan(wide[0]) & np.isnan(wide[1])) | (first == second))
    if not unequal.any():
        return None
    index = tuple(int(at) for at in np.argwhere(unequal)[0])
    largest = float(apart.max())
    return LeafDifference(name, index, first[index].item(), second[index].item(), _number(largest))


def _of_other_lengths(name: str, first: np.ndarray, second: np.ndarray, axis: int) -> LeafDifference:
    """Leaves of different shapes: the first number that one of them has and the other has not, or has otherwise."""
    if first.ndim != 1 or second.ndim != 1:
        return LeafDifference(f"{name}.shape", (axis,), first.shape[axis], second.shape[axis], None)
    shorter = min(len(first), len(second))
    same = first[:shorter] == second[:shorter]
    at = int(np.argmin(same)) if not same.all() else shorter
    mine, its = (leaf[at].item() if at < len(leaf) else None for leaf in (first, second))
    return LeafDifference(name, (at,), mine, its, None)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
