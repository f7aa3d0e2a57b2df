"""How often the target keeps what is drafted, counted as it happens."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jaxtyping import Bool, Float, Int

from dflash_jax.engine.prospects import EDGES, NUM_BINS

_PRIOR_WEIGHT = 8
"""Tokens that the first guess counts as."""

_MOST_SEEN = 4096
"""Tokens after which all counts are halved, so that what was long ago matters less."""

_MANY = 1024
"""Tokens that are enough to know a draft by."""

_RECENT = 64
"""Drafted blocks that stand for those to come."""


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Counts of drafted tokens by position in the block and by how sure the draft was; see `engine.prospects`.

    Attributes:
      seen: tokens that were verified and whose predecessors were kept.
      kept: those of them that were kept too.
      recent: the bins of the last drafted blocks.
    """

    seen: Float[np.ndarray, "drafts bins"]
    kept: Float[np.ndarray, "drafts bins"]
    recent: Int[np.ndarray, "blocks drafts"]

    def chance(self) -> Float[np.ndarray, "drafts bins"]:
        """That a token is kept if those before it are."""
        return ((self.kept + _PRIOR_WEIGHT * _FIRST_GUESS) / (self.seen + _PRIOR_WEIGHT)).astype(np.float32)

    def kept_per_row(self, spare: float) -> float:
        """Drafted tokens that a row keeps on average, if `spare` of them a row are verified, the likeliest ones.

        Blocks to come are taken to be like the last ones.
        """
        blocks, kept = len(self.recent), self._kept_of_likeliest
        return float(kept[min(round(spare * blocks), len(kept) - 1)]) / blocks if blocks else 0.0

    @functools.cached_property
    def _kept_of_likeliest(self) -> Float[np.ndarray, " counts"]:
        """Of the last blocks' 0, 1, 2, ... likeliest tokens: how many are kept."""
        survival = np.cumprod(self.chance()[np.arange(self.recent.shape[1]), self.recent], axis=1)
        return np.concatenate([[0.0], np.cumsum(np.sort(survival, axis=None)[::-1])])

    @functools.cached_property
    def settled(self) -> bool:
        """Whether so much was counted that a block more hardly matters."""
        return bool(self.seen.sum() > _MANY)

    def with_blocks(
        self,
        bins: Int[np.ndarray, "blocks drafts"],
        verified: Int[np.ndarray, " blocks"],
        accepted: Int[np.ndarray, " blocks"],
    ) -> Calibration:
        """With more blocks counted.

        Args:
          bins: how sure the draft was of each token.
          verified: how many tokens of each block were verified.
          accepted: how many of those were kept.
        """
        offsets = np.arange(bins.shape[1])
        seen = (offsets < verified[:, None]) & (offsets <= accepted[:, None])
        kept = offsets < accepted[:, None]
        cells = offsets * NUM_BINS + bins

        def count(which: Bool[np.ndarray, "blocks drafts"]) -> Float[np.ndarray, "drafts bins"]:
            return np.bincount(cells[which], minlength=self.seen.size).reshape(self.seen.shape).astype(float)

        share = 0.5 if self.seen.sum() > _MOST_SEEN else 1.0
        return Calibration(
            seen=self.seen * share + count(seen),
            kept=self.kept * share + count(kept & seen),
            recent=np.concatenate([self.recent, bins])[-_RECENT:],
        )


# With two candidates whose scores are so far apart, the better one has this probability.
_FIRST_GUESS = 1 / (1 + np.exp(-np.array([0.0, *EDGES])))


def uncalibrated(drafts: int) -> Calibration:
    """Nothing counted yet, for blocks of so many drafted tokens."""
    zeros = np.zeros((drafts, NUM_BINS))
    return Calibration(zeros, zeros, np.zeros((0, drafts), np.int32))
