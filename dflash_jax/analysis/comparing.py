"""Drafters on the same prompts: mean acceptance lengths and their differences, with paired confidence intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from dflash_jax.acceptance import total_acceptance
from dflash_jax.analysis.bootstrap import Interval, interval, resamples
from dflash_jax.analysis.rounds import Recorded
from dflash_jax.engine import Completion
from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Some runs of the same prompts. The first is what the others are compared with.

    Attributes:
      labels: of the runs.
      per_prompt: mean acceptance length of each prompt; NaN where a run drafted nothing for it.
      length: mean acceptance length over all prompts, as `Metrics.mean_acceptance_length` counts it.
      length_interval: where that lies, had other prompts of the kind been drawn.
      difference: of each run's length from the first one's.
      difference_interval: where the difference lies. The same prompts are drawn for both, so that what makes a
        prompt hard for both does not blur it.
      level: the confidence.
    """

    labels: tuple[str, ...]
    per_prompt: Float[np.ndarray, "runs prompts"]
    length: Float[np.ndarray, " runs"]
    length_interval: tuple[Interval, ...]
    difference: Float[np.ndarray, " runs"]
    difference_interval: tuple[Interval, ...]
    level: float

    @property
    def differ(self) -> tuple[bool, ...]:
        """Whether each run's difference from the first is beyond chance: its interval leaves out 0."""
        return tuple(not low <= 0 <= high for low, high in self.difference_interval)


def compare(
    runs: Mapping[str, Sequence[Recorded]], *, level: float = 0.95, times: int = 4000, seed: int = 0
) -> Comparison:
    """Compares runs of the same prompts.

    Args:
      runs: completions, or lines of job outputs, by label; the same prompts in each, in the same order or, for lines
        of jobs, under the same ids.
      level: confidence of the intervals.
      times: resamples of the prompts.
      seed: of the resampling.

    Raises:
      ConfigError: there is no prompt, or the runs are not of the same prompts.
    """
    aligned = _aligned(runs)
    counts = np.array([[_counts(one) for one in run] for run in aligned.values()], float)
    accepted, rounds = counts[..., 0], counts[..., 1]
    drawn = resamples(counts.shape[1], times, seed)
    sampled = _lengths(accepted[:, drawn].sum(-1), rounds[:, drawn].sum(-1))
    length = _lengths(accepted.sum(1), rounds.sum(1))
    return Comparison(
        labels=tuple(runs),
        per_prompt=_lengths(accepted, rounds),
        length=length,
        length_interval=tuple(interval(samples, level) for samples in sampled),
        difference=length - length[0],
        difference_interval=tuple(interval(samples - sampled[0], level) for samples in sampled),
        level=level,
    )


def _aligned(runs: Mapping[str, Sequence[Recorded]]) -> dict[str, list[Recorded]]:
    """The runs with their requests in the order of the first one's."""
    found = {label: list(run) for label, run in runs.items()}
    if not found or not next(iter(found.values())):
        raise ConfigError("there is nothing to compare; give one run at least, of one prompt at least")
    (first, wanted), *others = found.items()
    for label, run in others:
        if len(run) != len(wanted):
            raise ConfigError(
                f"{label!r} has {len(run)} requests and {first!r} has {len(wanted)}; they must be of the same prompts"
            )
        if not any(isinstance(one, Completion) for one in (*run, *wanted)):
            place = {_field(one, "id"): one for one in run}
            missing = [_field(one, "id") for one in wanted if _field(one, "id") not in place]
            if missing:
                raise ConfigError(f"{label!r} has no request {missing[0]!r}, which {first!r} has")
            found[label] = [place[_field(one, "id")] for one in wanted]
        for at, (one, other) in enumerate(zip(found[label], wanted, strict=True)):
            mine, its = _field(one, "prompt_tokens"), _field(other, "prompt_tokens")
            if mine != its:
                raise ConfigError(
                    f"request {at} has a prompt of {mine} tokens in {label!r} and of {its} in {first!r}; "
                    "the runs must be of the same prompts"
                )
    return found


def _field(one: Recorded, name: str):
    return one[name] if isinstance(one, Mapping) else getattr(one, name)


def _counts(one: Recorded) -> tuple[int, int]:
    found = total_acceptance([_field(one, "metrics")])
    return found.drafts_accepted, found.drafted_request_steps


def _lengths(accepted: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    return 1 + np.divide(accepted, rounds, out=np.full(rounds.shape, np.nan), where=rounds > 0)
