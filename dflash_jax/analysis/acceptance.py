"""Acceptance in recorded rounds: by position, by kind of token, over time, and request by request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from dflash_jax.analysis.rounds import Rounds


@dataclasses.dataclass(frozen=True)
class PositionAcceptance:
    """How often the token drafted at each position was kept. Position i of the arrays is drafted token i + 1.

    Attributes:
      reached: rounds in which it is known what became of the position, because all before it were kept.
      kept: rounds of these in which its token was kept.
      rate: kept / reached: the chance of the token, given those before it; NaN where nothing is known.
      survival: the chance that the token and all before it are kept: the product of the rates (Kaplan and Meier's
        estimate, so a round that was cut short counts as far as it goes).
    """

    reached: Int[np.ndarray, " drafts"]
    kept: Int[np.ndarray, " drafts"]
    rate: Float[np.ndarray, " drafts"]
    survival: Float[np.ndarray, " drafts"]

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a round: one of the target's own, and the drafted ones that survive."""
        return 1 + float(np.nansum(self.survival))


def by_position(rounds: Rounds) -> PositionAcceptance:
    """Acceptance by position in the block."""
    reached, kept = rounds.observed.sum(0), (rounds.was_kept & rounds.observed).sum(0)
    rate = _ratio(kept, reached)
    return PositionAcceptance(reached, kept, rate, np.cumprod(rate))


@dataclasses.dataclass(frozen=True)
class KindAcceptance:
    """How often drafted tokens were kept, by the kind of token that stands at their place.

    Attributes:
      kinds: names, most frequent first.
      reached, kept, rate: as of `PositionAcceptance`.
    """

    kinds: tuple[str, ...]
    reached: Int[np.ndarray, " kinds"]
    kept: Int[np.ndarray, " kinds"]
    rate: Float[np.ndarray, " kinds"]


def by_kind(
    rounds: Rounds, kind_of: Callable[[int], str], *, of: Literal["output", "drafted"] = "output"
) -> KindAcceptance:
    """Acceptance by kind of token.

    Args:
      rounds: the record.
      kind_of: the kind of a token; `token_kinds(engine.tokenizer)`, or any function.
      of: whose kind: the token that became output, which had to be guessed, or the one that was drafted.
    """
    tokens = rounds.output[:, : rounds.k] if of == "output" else rounds.drafted
    known = rounds.observed & (tokens >= 0)
    kept, tokens = (rounds.was_kept & known)[known], tokens[known]
    name_of = {token: kind_of(token) for token in np.unique(tokens).tolist()}
    kinds = np.array([name_of[token] for token in tokens.tolist()])
    names, counts = np.unique(kinds, return_counts=True) if len(kinds) else (np.array([], str), np.array([], int))
    order = np.argsort(-counts, kind="stable")
    kept_of = np.array([kept[kinds == name].sum() for name in names[order]], int)
    return KindAcceptance(tuple(names[order].tolist()), counts[order], kept_of, _ratio(kept_of, counts[order]))


@dataclasses.dataclass(frozen=True)
class AcceptanceOverTime:
    """Acceptance as outputs grow.

    Attributes:
      start: tokens produced before the first round of each window.
      rounds: rounds in each window.
      kept: drafted tokens kept in a round, on average; NaN in a window without rounds.
    """

    start: Int[np.ndarray, " windows"]
    rounds: Int[np.ndarray, " windows"]
    kept: Float[np.ndarray, " windows"]


def over_time(rounds: Rounds, *, window: int = 16) -> AcceptanceOverTime:
    """Drafted tokens kept in a round, over the place in the output where the round began.

    Rounds that were cut or that drafted nothing are left out.

    Args:
      rounds: the record.
      window: tokens of output that are taken together.
    """
    whole = rounds.where(~rounds.cut & (rounds.verified > 0))
    place = whole.start // window
    count = np.bincount(place) if len(place) else np.array([], int)
    kept = np.bincount(place, whole.kept) if len(place) else np.array([], float)
    return AcceptanceOverTime(np.arange(len(count)) * window, count, _ratio(kept, count))


def heat_map(rounds: Rounds) -> Float[np.ndarray, "requests rounds"]:
    """Drafted tokens kept in each round of each request; NaN where there was no round, or none with a draft."""
    found = np.full((len(rounds.ids), int(rounds.number.max(initial=-1)) + 1), np.nan)
    drafted = rounds.verified > 0
    found[rounds.request[drafted], rounds.number[drafted]] = rounds.kept[drafted]
    return found


def _ratio(part: np.ndarray, whole: np.ndarray) -> Float[np.ndarray, " n"]:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
