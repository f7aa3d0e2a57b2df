"""What all plots share: axes to draw on, colours, and curves that stay visible where they are equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

KEPT, REJECTED, UNDECIDED = "#2a7f3f", "#c0392b", "#8a8a8a"
"""Colours of drafted tokens that the target keeps, that it replaces, and that it never came to."""

_MARKERS = "osD^vPX*"


def axes_of(ax: Axes | None, *, size: tuple[float, float] = (6.4, 3.6)) -> Axes:
    """The axes that were given, or those of a new figure."""
    if ax is not None:
        return ax
    _, new = plt.subplots(figsize=size, layout="constrained")
    return new


def curve_styles(count: int) -> Iterator[dict[str, Any]]:
    """Styles of curves in one plot: each is narrower than the one before and has other markers.

    So of curves that lie on each other the lower ones show at the sides of the upper ones.
    """
    for at in range(count):
        left = count - 1 - at
        yield {
            "color": f"C{at}",
            "linewidth": 1.5 + 2.5 * left,
            "marker": _MARKERS[at % len(_MARKERS)],
            "markersize": 5 + 4 * left,
            "alpha": 1.0 if left == 0 else 0.45,
            "zorder": 2 + at,
        }


def whole_numbers(ax: Axes, which: str = "x") -> None:
    """Ticks at whole numbers only: there is no position 1.5."""
    for axis in which:
        getattr(ax, f"{axis}axis").set_major_locator(MaxNLocator(integer=True))
