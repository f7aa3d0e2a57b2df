"""What other numbers of drafted tokens, and other costs, would have brought: estimated from recorded rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

from dflash_jax.analysis.acceptance import by_position
from dflash_jax.analysis.bootstrap import interval, resamples
from dflash_jax.analysis.rounds import Rounds
from dflash_jax.engine.costs import Costs, Round
from dflash_jax.errors import ConfigError

CostTable = Callable[[int], float]
"""What a round with k drafted tokens costs, in rounds of plain decoding, which cost 1; k = 0 is such a round."""


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """Estimates for each number of drafted tokens, from 0, which is plain decoding.

    Attributes:
      k: the number.
      tokens_per_round: expected tokens of a round.
      cost: of a round, in rounds of plain decoding.
      speed_up: tokens_per_round / cost.
      low, high: where the speed-up lies, had other requests of the kind been drawn.
      extrapolated: more tokens than were recorded: their chances are taken to be that of the last recorded one.
    """

    k: Int[np.ndarray, " options"]
    tokens_per_round: Float[np.ndarray, " options"]
    cost: Float[np.ndarray, " options"]
    speed_up: Float[np.ndarray, " options"]
    low: Float[np.ndarray, " options"]
    high: Float[np.ndarray, " options"]
    extrapolated: Bool[np.ndarray, " options"]

    @property
    def best(self) -> int:
        """The number of drafted tokens with the largest speed-up."""
        return int(self.k[np.argmax(self.speed_up)])


def linear_cost(*, draft: float, token: float) -> CostTable:
    """Costs that grow evenly.

    Args:
      draft: cost of running the draft, in plain rounds.
      token: cost of verifying one token more, in plain rounds.
    """
    return lambda k: 1 + (draft + token * k if k else 0)


def measured_cost(costs: Costs, *, rows: int = 1, context: int = 0) -> CostTable:
    """Costs that an engine with `width="auto"` measured: `engine.host.experience.costs`.

    Between numbers of tokens that ran, costs are interpolated; past them, the last two are continued.

    Args:
      costs: the measurements.
      rows: requests in the batch.
      context: the class of the contexts' lengths; see `costs.context_of`.

    Raises:
      ConfigError: rounds with and without a draft, of so many rows, were not measured.
    """
    plain = costs.seconds(Round(rows, rows, False, context))
    sizes = {kind.tokens for kind in costs.samples if kind.rows == rows and kind.drafting}
    known = {size / rows - 1: costs.seconds(Round(rows, size, True, context)) for size in sorted(sizes)}
    points = {k: seconds for k, seconds in known.items() if seconds is not None}
    if plain is None or not points:
        what = "without a draft" if plain is None else "with a draft"
        raise ConfigError(
            f"no rounds of {rows} rows {what} were measured; run more with draft.width auto, or give linear_cost"
        )
    ks, seconds = np.array(list(points)), np.array(list(points.values())) / plain
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (ks[-1] - ks[-2])) if len(ks) > 1 else 0.0

    def cost(k: int) -> float:
        return 1.0 if k == 0 else float(np.interp(k, ks, seconds) + slope * max(0.0, k - ks[-1]))

    return cost


def what_if(
    rounds: Rounds,
    cost: CostTable | Mapping[int, float],
    *,
    most: int | None = None,
    level: float = 0.95,
    times: int = 1000,
    seed: int = 0,
) -> WhatIf:
    """The speed-up that other numbers of drafted tokens would bring.

    The chance of each position is taken from the record. For fewer tokens than were drafted that is what verifying
    only the first of them (`draft.width`) brings; a draft that is run with a smaller block drafts other tokens, though
    mostly similar ones.

    Args:
      rounds: the record.
      cost: of a round with k drafted tokens, in plain rounds; a function, or a table that has every k.
      most: the largest number to look at; as many as were drafted by default.
      level: confidence of the intervals.
      times: resamples of the requests.
      seed: of the resampling.

    Raises:
      ConfigError: nothing was drafted in the record, or the table lacks a number.
    """
    if not rounds.observed.any():
        raise ConfigError("the rounds have no drafted token that was verified, so nothing follows for other numbers")
    most = rounds.k if most is None else most
    ks = np.arange(most + 1)
    if isinstance(cost, Mapping):
        missing = [k for k in ks.tolist() if k and k not in cost]
        if missing:
            raise ConfigError(
                f"the cost table has no entry for k = {missing[0]}; it must have one for each up to {most}"
            )
        costs = np.array([cost.get(k, 1.0) for k in ks.tolist()], float)
    else:
        costs = np.array([cost(k) for k in ks.tolist()], float)
    tokens = _tokens(by_position(rounds).rate[None], most)[0]
    reached, kept = _by_request(rounds)
    drawn = resamples(len(reached), times, seed)
    sampled_reached, sampled_kept = reached[drawn].sum(1), kept[drawn].sum(1)
    nothing = np.full(sampled_reached.shape, np.nan)
    rates = np.divide(sampled_kept, sampled_reached, out=nothing, where=sampled_reached > 0)
    bounds = [interval(samples, level) for samples in (_tokens(rates, most) / costs).T]
    return WhatIf(
        k=ks,
        tokens_per_round=tokens,
        cost=costs,
        speed_up=tokens / costs,
        low=np.array([bound.low for bound in bounds]),
        high=np.array([bound.high for bound in bounds]),
        extrapolated=ks > rounds.k,
    )


def _by_request(rounds: Rounds) -> tuple[np.ndarray, np.ndarray]:
    """Counts of `by_position`, [requests, drafts]."""
    requests = len(rounds.ids)
    reached, kept = np.zeros((requests, rounds.k), int), np.zeros((requests, rounds.k), int)
    np.add.at(reached, rounds.request, rounds.observed)
    np.add.at(kept, rounds.request, rounds.was_kept & rounds.observed)
    return reached, kept


def _tokens(rates: Float[np.ndarray, "times drafts"], most: int) -> Float[np.ndarray, "times options"]:
    """Expected tokens of a round, for 0 to `most` drafted tokens.

    A position of which nothing is known is taken to be like the one before it.
    """
    rates = rates.copy()
    for at in range(1, rates.shape[1]):
        rates[:, at] = np.where(np.isnan(rates[:, at]), rates[:, at - 1], rates[:, at])
    rates = np.nan_to_num(rates)
    more = np.repeat(rates[:, -1:], max(0, most - rates.shape[1]), axis=1)
    survival = np.cumprod(np.concatenate([rates, more], axis=1)[:, :most], axis=1)
    return 1 + np.concatenate([np.zeros((len(rates), 1)), np.cumsum(survival, axis=1)], axis=1)
