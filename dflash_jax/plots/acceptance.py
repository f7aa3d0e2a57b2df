"""Acceptance as pictures: by position, survival, heat map, over time, comparisons, what-if."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap

from dflash_jax.analysis.acceptance import AcceptanceOverTime, KindAcceptance, PositionAcceptance
from dflash_jax.analysis.comparing import Comparison
from dflash_jax.analysis.speed_ups import WhatIf
from dflash_jax.plots.style import axes_of, curve_styles, whole_numbers


def plot_positions(found: Mapping[str, PositionAcceptance], *, ax: Axes | None = None) -> Axes:
    """The rate of each drafted position, given that those before it were kept; a point for each, curves by label."""
    ax = axes_of(ax)
    for (label, one), style in zip(found.items(), curve_styles(len(found)), strict=True):
        ax.plot(np.arange(1, len(one.rate) + 1), one.rate, label=label, **{**style, "linestyle": ":"})
    return _finish(ax, "drafted position", "kept, if those before it are")


def plot_survival(found: Mapping[str, PositionAcceptance], *, ax: Axes | None = None) -> Axes:
    """The share of rounds that keep at least so many drafted tokens, as steps; curves by label."""
    ax = axes_of(ax)
    for (label, one), style in zip(found.items(), curve_styles(len(found)), strict=True):
        steps = np.concatenate([[1.0], one.survival])
        title = f"{label}: {one.tokens_per_round:.2f} tokens a round"
        ax.plot(np.arange(len(steps)), steps, drawstyle="steps-mid", label=title, **style)
    return _finish(ax, "drafted tokens kept, at least", "share of rounds")


def _finish(ax: Axes, xlabel: str, ylabel: str) -> Axes:
    ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(-0.03, 1.05))
    whole_numbers(ax)
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax


def plot_kinds(found: KindAcceptance, *, ax: Axes | None = None) -> Axes:
    """A bar for each kind of token, with how many there were."""
    ax = axes_of(ax)
    places = np.arange(len(found.kinds))
    bars = ax.bar(places, np.nan_to_num(found.rate), color="C0")
    ax.bar_label(
        bars, [f"{kept} of {reached}" for kept, reached in zip(found.kept, found.reached, strict=True)], fontsize=7
    )
    ax.set_xticks(places, found.kinds, rotation=20)
    ax.set(ylabel="drafted tokens kept", ylim=(0, 1.1))
    return ax


def plot_heat_map(found: Float[np.ndarray, "requests rounds"], *, ax: Axes | None = None, k: int | None = None) -> Axes:
    """Drafted tokens kept in each round of each request: one colour for each number, white where there was no round.

    Args:
      found: what `heat_map` returned.
      ax: where to draw; a new figure by default.
      k: drafted tokens of a round, for the colours; the most that were kept by default.
    """
    ax = axes_of(ax, size=(7, 0.35 * len(found) + 1.4))
    most = int(np.nanmax(found, initial=0)) if k is None else k
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, 1, most + 1)))
    edges = np.arange(-0.5, most + 1)
    mesh = ax.pcolormesh(
        np.arange(found.shape[1] + 1) + 0.5,
        np.arange(found.shape[0] + 1) - 0.5,
        np.ma.masked_invalid(found),
        cmap=colours,
        norm=BoundaryNorm(edges, most + 1),
        edgecolors="white",
        linewidth=0.5,
    )
    ax.figure.colorbar(mesh, ax=ax, ticks=range(most + 1), label="drafted tokens kept")
    ax.set(xlabel="round", ylabel="request")
    ax.invert_yaxis()
    whole_numbers(ax, "xy")
    return ax


def plot_over_time(found: Mapping[str, AcceptanceOverTime], *, ax: Axes | None = None) -> Axes:
    """Drafted tokens kept in a round as outputs grow; curves by label."""
    ax = axes_of(ax)
    for (label, one), style in zip(found.items(), curve_styles(len(found)), strict=True):
        ax.plot(one.start, one.kept, drawstyle="steps-post", label=label, **style)
    ax.set(xlabel="tokens of output before the round", ylabel="drafted tokens kept", ylim=(0, None))
    whole_numbers(ax)
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax


def plot_comparison(found: Comparison, *, ax: Axes | None = None) -> Axes:
    """Mean acceptance length of each run, its interval, and a point for each prompt; differences in the labels.

    A prompt's points are joined, so that it shows whether a run is better on most prompts or on a few.
    """
    ax = axes_of(ax)
    places = np.arange(len(found.labels))
    for one in found.per_prompt.T:
        ax.plot(places, one, color="#bbbbbb", linewidth=0.6, marker=".", markersize=4, zorder=1)
    for at, (length, bounds) in enumerate(zip(found.length, found.length_interval, strict=True)):
        below, above = max(0.0, length - bounds.low), max(0.0, bounds.high - length)
        ax.errorbar([at], [length], [[below], [above]], fmt="o", color=f"C{at}", capsize=5, linewidth=2, zorder=3)
    ax.set_xticks(places, [_with_difference(found, at) for at in range(len(places))])
    ax.set(ylabel="mean acceptance length", xlim=(-0.5, len(places) - 0.5))
    ax.grid(alpha=0.3, axis="y")
    ax.set_title(f"{found.per_prompt.shape[1]} prompts, {found.level:.0%} intervals", fontsize="medium")
    return ax


def _with_difference(found: Comparison, at: int) -> str:
    if at == 0:
        return found.labels[0]
    low, high = found.difference_interval[at]
    return f"{found.labels[at]}\n{found.difference[at]:+.2f} ({low:+.2f} to {high:+.2f})"


def plot_what_if(found: Mapping[str, WhatIf], *, ax: Axes | None = None) -> Axes:
    """The speed-up of each number of drafted tokens, with its interval; hollow where it is extrapolated."""
    ax = axes_of(ax)
    for (label, one), style in zip(found.items(), curve_styles(len(found)), strict=True):
        below, above = np.maximum(one.speed_up - one.low, 0), np.maximum(one.high - one.speed_up, 0)
        ax.errorbar(
            one.k, one.speed_up, [below, above], label=label, capsize=3, elinewidth=1, **{**style, "linestyle": ":"}
        )
        hollow = one.k[one.extrapolated]
        ax.plot(
            hollow, one.speed_up[one.extrapolated], "o", markersize=style["markersize"] + 4, mfc="none", mec="black"
        )
        ax.annotate(
            f"best: {one.best}",
            (one.best, one.speed_up.max()),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    ax.axhline(1, color="grey", linewidth=1)
    ax.set(xlabel="drafted tokens of a round", ylabel="speed-up over plain decoding")
    whole_numbers(ax)
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax
