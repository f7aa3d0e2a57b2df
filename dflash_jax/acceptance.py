"""Acceptance counts and ratios of speculation, in vLLM's conventions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts of drafting; counts of several requests add up with `+`.

    Attributes:
      drafts_proposed: drafted tokens that the target ran.
      drafts_accepted: drafted tokens that became output; the target's own token after them does not count.
      drafted_request_steps: rounds of a request that carried a draft.
    """

    drafts_proposed: int = 0
    drafts_accepted: int = 0
    drafted_request_steps: int = 0

    @property
    def accept_rate(self) -> float | None:
        """Accepted over proposed tokens; None when nothing was drafted."""
        return self.drafts_accepted / self.drafts_proposed if self.drafts_proposed else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round with a draft produces: 1 + accepted / rounds; None when nothing was drafted."""
        return 1 + self.drafts_accepted / self.drafted_request_steps if self.drafted_request_steps else None

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(*(getattr(self, name) + getattr(other, name) for name in _COUNTS))

    def counts(self) -> dict[str, int]:
        """The three counts, by name."""
        return dataclasses.asdict(self)

    def ratios(self, digits: int | None = None) -> dict[str, float | None]:
        """`accept_rate` and `mean_acceptance_length`, by name, rounded to so many digits if given."""
        ratios = {"accept_rate": self.accept_rate, "mean_acceptance_length": self.mean_acceptance_length}
        if digits is None:
            return ratios
        return {name: None if value is None else round(value, digits) for name, value in ratios.items()}


_COUNTS = tuple(field.name for field in dataclasses.fields(Acceptance))


def total_acceptance(metrics: Iterable[Any]) -> Acceptance:
    """The sum over requests.

    Args:
      metrics: of each request, `Metrics` or a mapping with the same names; what a mapping lacks counts as 0.
    """
    total = Acceptance()
    for each in metrics:
        values = each if isinstance(each, Mapping) else vars(each)
        total += Acceptance(*(values.get(name) or 0 for name in _COUNTS))
    return total
