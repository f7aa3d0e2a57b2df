"""How long rounds take, measured as they run."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, NamedTuple

import immutables

_SAMPLES = 5
"""Measurements that are kept of each kind of round: enough for one that was disturbed not to count."""

_ENOUGH = 3
"""Measurements after which a kind of round is known."""

_SHORT_CONTEXT = 512
"""Up to this mean length of contexts, in tokens, the length is not told apart."""


class Round(NamedTuple):
    """A kind of round, as far as its time depends on it.

    Attributes:
      rows: of the batch, empty ones included.
      tokens: that the target runs.
      drafting: a draft runs before it.
      context: how long contexts are, as `context_of` says.
    """

    rows: int
    tokens: int
    drafting: bool
    context: int


def context_of(mean_tokens: float) -> int:
    """The class of a mean context length: doubles of 512 tokens."""
    return max(0, (int(mean_tokens) - 1) // _SHORT_CONTEXT).bit_length()


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured seconds of rounds.

    Attributes:
      samples: the last few measurements of each kind.
      last_run: of each kind, regardless of the context, the number that its last round had among those of as many rows.
      rounds: rounds that were run with so many rows.
    """

    samples: immutables.Map[Round, tuple[float, ...]] = dataclasses.field(default_factory=immutables.Map)
    last_run: immutables.Map[Round, int] = dataclasses.field(default_factory=immutables.Map)
    rounds: immutables.Map[int, int] = dataclasses.field(default_factory=immutables.Map)

    def seconds(self, kind: Round) -> float | None:
        """What a round takes; of contexts of the most similar length that it is known for, None if for none."""
        samples = self.samples.get(kind, ())
        if len(samples) >= _ENOUGH:
            return statistics.median(samples)
        found = [
            (abs(context - kind.context), context)
            for context in range(kind.context + _MOST_CONTEXTS)
            if len(self.samples.get(kind._replace(context=context), ())) >= _ENOUGH
        ]
        return statistics.median(self.samples[kind._replace(context=min(found)[1])]) if found else None

    def at_least(self, kind: Round) -> float:
        """Seconds that a round cannot take less than: those of rounds with fewer rows and tokens."""
        smaller = [
            statistics.median(samples)
            for other, samples in self.samples.items()
            if all(mine <= its for mine, its in zip(other, kind, strict=True)) and len(samples) >= _ENOUGH
        ]
        return max(smaller, default=0.0)

    def age(self, kind: Round) -> int:
        """Rounds with as many rows since one of this kind."""
        return self.rounds.get(kind.rows, 0) - self.last_run.get(kind._replace(context=0), 0)

    def with_round(self, kind: Round, seconds: float | None) -> Costs:
        """With a round counted, and its time if it was measured."""
        number = self.rounds.get(kind.rows, 0) + 1
        samples = self.samples
        if seconds is not None:
            samples = samples.set(kind, (*samples.get(kind, ()), seconds)[-_SAMPLES:])
        return Costs(samples, self.last_run.set(kind._replace(context=0), number), self.rounds.set(kind.rows, number))

    def as_json(self) -> list[dict[str, Any]]:
        """The measurements as plain values."""
        return [{**kind._asdict(), "seconds": list(samples)} for kind, samples in sorted(self.samples.items())]


_MOST_CONTEXTS = 24
"""Classes of context lengths past a round's own in which its time is looked up: to far longer ones than there are."""


def costs_from_json(values: list[dict[str, Any]]) -> Costs:
    """Measurements that `Costs.as_json` returned."""
    samples = {
        Round(int(v["rows"]), int(v["tokens"]), bool(v["drafting"]), int(v["context"])): tuple(map(float, v["seconds"]))
        for v in values
    }
    return Costs(samples=immutables.Map(samples))
