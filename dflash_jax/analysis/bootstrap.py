"""Confidence intervals by resampling (Efron 1979).

What is drawn are requests, because the rounds of one depend on each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Interval(NamedTuple):
    """Where a figure lies with the stated confidence."""

    low: float
    high: float


def resamples(count: int, times: int, seed: int) -> Int[np.ndarray, "times count"]:
    """For each resample, which requests are drawn, with replacement."""
    return np.random.default_rng(seed).integers(count, size=(times, count))


def interval(samples: Float[np.ndarray, " times"], level: float) -> Interval:
    """The middle `level` of the samples, those that are not numbers left out."""
    found = samples[np.isfinite(samples)]
    if not len(found):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))
