"""A recorded run as a picture: which request each slot, or each row, was busy with in each step."""

from __future__ import annotations

from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from dflash_jax.analysis.timeline import Timeline
from dflash_jax.plots.style import axes_of, whole_numbers


def plot_timeline(timeline: Timeline, *, ax: Axes | None = None, of: Literal["slots", "rows"] = "slots") -> Axes:
    """A cell for each step and each slot or row, in the colour of its request; hatched where it runs its prompt.

    A request keeps its slot for its whole life and changes rows; a cross ends it, and a triangle tells of a preemption.

    Args:
      timeline: what was recorded.
      ax: where to draw; a new figure by default.
      of: slots, or the rows of the rounds.
    """
    number = {request: at for at, request in enumerate(timeline.requests)}
    places = 1 + max((_place(work, of) for step in timeline.steps for work in step.rows), default=0)
    ax = axes_of(ax, size=(7.5, 0.45 * places + 1.5))
    labelled: set[str] = set()
    last: dict[str, int] = {}
    for at, step in enumerate(timeline.steps):
        for work in step.rows:
            if of == "rows" and work.kind == "prefill":
                continue
            place = _place(work, of)
            hatch = "////" if work.kind == "prefill" else None
            ax.broken_barh(
                [(at + 0.5, 1)],
                (place - 0.4, 0.8),
                facecolor=_colour(number[work.request]),
                edgecolor="white",
                linewidth=0.8,
                hatch=hatch,
            )
            if work.request not in labelled:
                labelled.add(work.request)
                ax.text(at + 0.6, place, work.request, va="center", fontsize=7, zorder=3)
            last[work.request] = place
        for name in step.finished:
            if name in last:
                ax.plot(at + 1.35, last[name], "x", color="black", markersize=6, zorder=4)
        for name in step.preempted:
            if name in last:
                ax.plot(at + 1, last[name], "v", color="black", markersize=6, zorder=4)
    ax.set(xlabel="step", ylabel="slot" if of == "slots" else "row", xlim=(0.5, max(1, len(timeline.steps)) + 0.5))
    ax.set_yticks(np.arange(places))
    ax.set_ylim(places - 0.5, -0.5)
    whole_numbers(ax)
    return ax


def _place(work, of: str) -> int:
    return work.slot if of == "slots" else work.row


def _colour(number: int) -> str:
    return f"C{number % 10}"
