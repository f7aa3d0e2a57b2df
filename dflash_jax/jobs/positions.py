"""Acceptance by position: how often the first, second, ... drafted token of a round was kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from dflash_jax.engine.output import Completion


@dataclasses.dataclass(frozen=True)
class Positions:
    """Counts of drafted tokens by their place in the block; those of several requests add up with `+`.

    Attributes:
      reached: rounds in which it is known whether the token would be kept, because all before it were.
      kept: rounds of these in which it was.
    """

    reached: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    def __add__(self, other: Positions) -> Positions:
        return Positions(_sum(self.reached, other.reached), _sum(self.kept, other.kept))

    def counts(self) -> dict[str, list[int]]:
        """Both, by name."""
        return {"reached": list(self.reached), "kept": list(self.kept)}

    def rates(self) -> list[float | None]:
        """Kept over reached: the chance of a token, given those before it."""
        return [
            round(kept / reached, 6) if reached else None for reached, kept in zip(self.reached, self.kept, strict=True)
        ]


def positions_of(completion: Completion) -> Positions:
    """Those of a request.

    The last round may be cut: the request's limit or a stop token came before the target's own token. What was drafted
    after it is then not known to be right or wrong, and does not count.
    """
    width = max(completion.verified_per_round, default=0)
    reached, kept = [0] * width, [0] * width
    rounds = list(
        zip(completion.produced_per_round, completion.verified_per_round, completion.drafted_blocks, strict=False)
    )
    for number, (produced, verified, block) in enumerate(rounds, start=1):
        accepted, seen = produced - 1, min(produced, verified)
        if number == len(rounds) and 0 < produced <= verified and completion.token_ids[-1] == block[produced - 1]:
            accepted = produced
        for place in range(seen):
            reached[place] += 1
            kept[place] += place < accepted
    return Positions(tuple(reached), tuple(kept))


def positions_in(result: Mapping[str, Any]) -> Positions:
    """Those that a result has; none if it has none, or what is no such thing."""
    found = result.get("positions")
    if not isinstance(found, Mapping):
        return Positions()
    reached, kept = found.get("reached"), found.get("kept")
    if not (isinstance(reached, list) and isinstance(kept, list) and len(reached) == len(kept)):
        return Positions()
    if not all(isinstance(count, int) for count in (*reached, *kept)):
        return Positions()
    return Positions(tuple(reached), tuple(kept))


def _sum(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
