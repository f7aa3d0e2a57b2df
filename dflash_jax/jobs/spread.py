"""Mean and quantiles of any number of values, in a memory that does not grow with them."""

from __future__ import annotations

import math
from collections import Counter

_STEP = 1e-3
"""Width of a bin on the scale of logarithms: a quantile is off by half of it, 0.05%."""


class Spread:
    """Values that are 0 or more, counted in bins of equal ratio."""

    def __init__(self) -> None:
        self._bins: Counter[float] = Counter()
        self._sum, self._least, self._most = 0.0, math.inf, -math.inf

    def add(self, value: float) -> None:
        """Counts a value."""
        # What is shorter than a nanosecond is as good as none.
        self._bins[round(math.log(value) / _STEP) if value > 1e-9 else -math.inf] += 1
        self._sum += value
        self._least, self._most = min(self._least, value), max(self._most, value)

    def quantile(self, share: float) -> float:
        """The value that so great a share of the values does not exceed."""
        wanted, seen = share * (self._bins.total() - 1), 0
        for number in sorted(self._bins):
            seen += self._bins[number]
            if seen > wanted:
                return min(max(math.exp(number * _STEP), self._least), self._most)
        return self._most

    def figures(self) -> dict[str, float] | None:
        """The mean, the median and what 95% do not exceed; None without values."""
        count = self._bins.total()
        if not count:
            return None
        found = {"mean": self._sum / count, "p50": self.quantile(0.5), "p95": self.quantile(0.95)}
        return {name: round(value, 6) for name, value in found.items()}
