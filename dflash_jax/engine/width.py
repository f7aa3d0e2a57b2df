"""How many tokens a round verifies: as many as bring the most tokens a second.

A draft runs its whole block or not at all, because a shorter block would say something else. What is chosen is how
many of the drafted tokens the target runs, in all rows together, and whether anything is drafted. The choice weighs the
tokens that are expected to be kept (`engine.calibration`) against the time such rounds took (`engine.costs`).
`engine.prospects` hands the tokens out to the rows on the device.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_jax.engine.calibration import Calibration, uncalibrated
from dflash_jax.engine.costs import Costs, Round, costs_from_json

if TYPE_CHECKING:
    from dflash_jax.engine.steps import Report

_SETTLED = 16
"""Rounds with so many rows before a kind of round that never ran is tried: its program has to be compiled."""

_SELDOM = 4
"""Once a draft is well known, one round of so many is counted: counting takes time in every round."""

_STALE = 200
"""Rounds after which another kind is run once, to see whether it still is what it was."""

_NEAR, _STALE_IF_NEAR = 0.7, 40
"""So near to the best, in tokens a second, a kind of round may be better than it: it is run again sooner."""


class Width(NamedTuple):
    """What a round runs.

    Attributes:
      drafts: tokens to draft for each request, the whole block or 0.
      tokens: that the target runs in all rows, anchors included.
    """

    drafts: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Experience:
    """What an engine has seen of drafting.

    Attributes:
      calibration: how often drafted tokens were kept.
      costs: how long rounds took.
    """

    calibration: Calibration
    costs: Costs


def inexperienced(drafts: int) -> Experience:
    """Nothing seen yet, for blocks of so many drafted tokens."""
    return Experience(uncalibrated(drafts), Costs())


def widths(rows: int, drafts: int) -> tuple[Width, ...]:
    """What can be chosen: no draft; two, four, ... tokens a row; all that is drafted."""
    some = []
    per_row = 2
    while per_row < 1 + drafts:
        some.append(Width(drafts, rows * per_row))
        per_row *= 2
    return Width(0, rows), *some, Width(drafts, rows * (1 + drafts))


def likely_widths(experience: Experience | None, rows: int, drafts: int) -> tuple[Width, ...]:
    """What rounds of so many rows may run: what was run before; with no experience, and at first, all that is drafted.

    Args:
      experience: what was seen so far; None where the width is fixed.
      rows: of the batch.
      drafts: tokens of a drafted block; 0 for an engine that does not draft.
    """
    if not drafts:
        return (Width(0, rows),)
    options = widths(rows, drafts)
    ran = () if experience is None else experience.costs.samples
    known = {(kind.tokens, kind.drafting) for kind in ran if kind.rows == rows}
    return tuple(width for width in options if width == options[-1] or (width.tokens, width.drafts > 0) in known)


def choose_width(experience: Experience, *, rows: int, live: int, drafting: int, drafts: int, context: int) -> Width:
    """What the next round runs.

    Args:
      experience: what was seen so far.
      rows: of the batch.
      live: requests in it.
      drafting: those of them that a draft can be made for.
      drafts: tokens of a drafted block.
      context: the class of the contexts' lengths; see `costs.context_of`.
    """
    costs, options = experience.costs, widths(rows, drafts)
    # Without a draft it is not known how good drafts are.
    if not len(experience.calibration.recent):
        return options[-1]

    def kind(width: Width) -> Round:
        return Round(rows, width.tokens, width.drafts > 0, context)

    def produced(width: Width) -> float:
        """Tokens that a round brings."""
        if not width.drafts:
            return live
        return live + drafting * experience.calibration.kept_per_row((width.tokens - live) / drafting)

    known = {width: seconds for width in options if (seconds := costs.seconds(kind(width))) is not None}
    if not known:
        return _as_with_other_rows(costs, options, rows)
    rate = {width: produced(width) / seconds for width, seconds in known.items()}
    best = max(rate, key=lambda width: rate[width])
    settled = costs.rounds.get(rows, 0) >= _SETTLED
    for width in options:
        if width not in known and settled and produced(width) > rate[best] * costs.at_least(kind(width)):
            return width

    def patience(width: Width) -> int:
        return _STALE_IF_NEAR if rate[width] > _NEAR * rate[best] else _STALE

    stale = [width for width in known if width != best and costs.age(kind(width)) >= patience(width)]
    return max(stale, key=lambda width: costs.age(kind(width)), default=best)


def _as_with_other_rows(costs: Costs, options: tuple[Width, ...], rows: int) -> Width:
    """The option most like what was run last with the most similar number of rows; at first, all that is drafted."""
    others = [kind for kind in costs.last_run if kind.rows != rows]
    if not others:
        return options[-1]
    nearest = min(others, key=lambda kind: (abs(kind.rows.bit_length() - rows.bit_length()), -costs.last_run[kind]))
    if not nearest.drafting:
        return options[0]
    wanted = nearest.tokens / nearest.rows * rows
    return min(options[1:], key=lambda width: abs(width.tokens - wanted))


def learn(
    experience: Experience, report: Report, *, tokens: int | None, context: int, seconds: float | None
) -> Experience:
    """What is known after a step's rounds.

    Args:
      experience: before.
      report: of the rounds, stacked on a leading axis.
      tokens: that the target ran in each of them; None for all of the rows' blocks.
      context: the class of the contexts' lengths.
      seconds: all of them took; None if that was not measured.
    """
    produced, verified, bins = np.asarray(report.produced), np.asarray(report.num_verified), np.asarray(report.bins)
    done = int((produced > 0).any(axis=1).sum())
    if not done:
        return experience
    rows, block = report.tokens.shape[1:]
    kind = Round(rows, tokens or rows * block, bins.shape[-1] > 0, context)
    costs = experience.costs.with_round(kind, None if seconds is None else seconds / done)
    calibration = experience.calibration
    if calibration.settled and costs.rounds[rows] % _SELDOM:
        return Experience(calibration, costs)
    # Of a request's last tokens it is not known what the target would have kept.
    counts = (verified > 0) & (produced > 0) & ~np.asarray(report.finished) & ~np.asarray(report.damaged_draft)
    if counts.any():
        calibration = calibration.with_blocks(bins[counts], verified[counts], produced[counts] - 1)
    return Experience(calibration, costs)


def experience_to_json(experience: Experience) -> dict[str, Any]:
    """As plain values."""
    counts = experience.calibration
    return {
        "seen": counts.seen.tolist(),
        "kept": counts.kept.tolist(),
        "recent": counts.recent.tolist(),
        "costs": experience.costs.as_json(),
    }


def experience_from_json(values: dict[str, Any]) -> Experience:
    """What `experience_to_json` returned."""
    seen, kept = np.array(values["seen"], float), np.array(values["kept"], float)
    recent = np.array(values["recent"], np.int32).reshape(-1, len(seen))
    return Experience(Calibration(seen, kept, recent), costs_from_json(values["costs"]))
