"""The picture of one round: candidates, the path through them, and where the target leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dflash_jax.analysis.lattice import Lattice
from dflash_jax.plots.style import KEPT, REJECTED, UNDECIDED, axes_of

_EDGES = 3
"""Best edges that are drawn into each candidate of the path; all of them would be a grey area."""


def plot_lattice(
    lattice: Lattice, *, ax: Axes | None = None, name_of: Callable[[int], str] = str, most: int = 6
) -> Axes:
    """Draws a round: a column for each drafted position, its candidates in it, the drafted path through them.

    Candidates stand in the order of their unary scores, so the path leaves the top row where DFlash 2's edges decide
    otherwise.

    The shade of a candidate is the target's probability of it, and the number below it the draft's. A drafted token
    has a green frame if the target keeps it and a red one if it does not; after that the target was not asked. The
    last row has what the target says itself at each position.

    Args:
      lattice: what `peek` returned.
      ax: where to draw; a new figure by default.
      name_of: what to write for a token; `lambda t: repr(tokenizer.decode([t]))` for text.
      most: candidates of each position, at most; the drafted one is always among them.
    """
    drafts = len(lattice.drafted)
    ax = axes_of(ax, size=(1.1 * drafts + 2.2, 0.62 * min(most, lattice.candidates.shape[1]) + 1.6))
    shown = [_shown(lattice, position, most) for position in range(drafts)]
    height = max(map(len, shown), default=1)
    anchor = (0.0, 0.0)
    places = [
        {int(index): (at + 1.0, float(-row)) for row, index in enumerate(chosen)} for at, chosen in enumerate(shown)
    ]
    path = [places[at][int(index)] for at, index in enumerate(lattice.path)]
    if lattice.edges is not None:
        _draw_edges(ax, lattice, places, [anchor, *path])
    for at, (start, end) in enumerate(zip([anchor, *path], path, strict=False)):
        ax.plot(*zip(start, end, strict=True), color=_colour(lattice, at), linewidth=2.5, zorder=2)
    _node(ax, anchor, name_of(lattice.anchor), shade=0.0, frame="black", width=1.5)
    for at, chosen in enumerate(shown):
        for index in chosen:
            drafted = index == lattice.path[at]
            _node(
                ax,
                places[at][int(index)],
                name_of(int(lattice.candidates[at, index])),
                shade=float(lattice.target[at, index]),
                frame=_colour(lattice, at) if drafted else "#bbbbbb",
                width=2.5 if drafted else 0.8,
            )
            x, y = places[at][int(index)]
            ax.text(
                x, y - 0.38, f"{lattice.proposal[at, index]:.2f}", ha="center", va="center", fontsize=6, color="#666666"
            )
    bottom = -height - 0.25
    for at, (token, probability) in enumerate(zip(lattice.target_best, lattice.target_best_probs, strict=True)):
        own = at == lattice.accepted
        asked = at <= lattice.accepted
        label = name_of(lattice.next_token if own else int(token))
        style: dict[str, Any] = {"color": "black" if asked else "#aaaaaa", "fontweight": "bold" if own else "normal"}
        ax.text(at + 1.0, bottom, f"{label}\n{probability:.2f}", ha="center", va="center", fontsize=8, **style)
    ax.text(0.0, bottom, "target says", ha="center", va="center", fontsize=8)
    ax.set_xlim(-0.7, drafts + 1.6)
    ax.set_ylim(bottom - 0.5, 0.6)
    ax.set_xticks(range(drafts + 2), ["anchor", *(f"+{at + 1}" for at in range(drafts + 1))])
    ax.set_yticks([])
    ax.set_xlabel(f"position after the anchor at {lattice.position}")
    ax.set_title(f"{lattice.accepted} of {lattice.verified} drafted tokens kept, then {name_of(lattice.next_token)}")
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    return ax


def _shown(lattice: Lattice, position: int, most: int) -> list[int]:
    """The candidates of a position that are drawn, best by themselves first; the drafted one too."""
    chosen = list(range(min(most, lattice.candidates.shape[1])))
    drafted = int(lattice.path[position])
    return chosen if drafted in chosen else [*chosen[: most - 1], drafted]


def _draw_edges(ax: Axes, lattice: Lattice, places, path) -> None:
    """The best edges from the path's token to the candidates of the next position, wider the likelier."""
    scores = lattice.edges_on_path
    assert scores is not None
    for at, start in enumerate(path[:-1]):
        shown = sorted(places[at], key=lambda index: -scores[at, index])[:_EDGES]
        likely = np.exp(scores[at] - scores[at].max())
        for index in shown:
            ax.plot(
                *zip(start, places[at][index], strict=True),
                color="#999999",
                linewidth=0.4 + 1.6 * float(likely[index]),
                zorder=1,
            )


def _colour(lattice: Lattice, position: int) -> str:
    if position < lattice.accepted:
        return KEPT
    return REJECTED if position == lattice.rejected else UNDECIDED


def _node(ax: Axes, place: tuple[float, float], label: str, *, shade: float, frame: str, width: float) -> None:
    light = 1 - 0.55 * min(max(shade, 0.0), 1.0)
    box = {"boxstyle": "round,pad=0.25", "facecolor": (light, light, 1.0), "edgecolor": frame, "linewidth": width}
    ax.text(*place, label, ha="center", va="center", fontsize=9, bbox=box, zorder=3)
