"""What was recorded of rounds, as arrays: the common input of everything that counts acceptance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from dflash_jax.engine import Completion
from dflash_jax.errors import ConfigError, quote

Recorded = Completion | Mapping[str, Any]
"""A completion, or a line of a job's output that has its trace."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds of some requests, one entry each, request by request in the order they were run.

    Attributes:
      ids: of the requests.
      request: which of them a round is of.
      number: of the round in its request, from 0.
      start: tokens that the request had produced before the round.
      drafts: tokens that were drafted; 0 in a round that decoded plainly.
      verified: how many of them the target ran, from the first on.
      produced: tokens that the round added to the output.
      kept: how many of those are drafted ones.
      cut: the output ended within what the target kept, so that it is not known how much more it would have.
      drafted: the drafted tokens, -1 past their end.
      output: the tokens the round added, -1 past their end.
    """

    ids: tuple[str | int, ...]
    request: Int[np.ndarray, " rounds"]
    number: Int[np.ndarray, " rounds"]
    start: Int[np.ndarray, " rounds"]
    drafts: Int[np.ndarray, " rounds"]
    verified: Int[np.ndarray, " rounds"]
    produced: Int[np.ndarray, " rounds"]
    kept: Int[np.ndarray, " rounds"]
    cut: Bool[np.ndarray, " rounds"]
    drafted: Int[np.ndarray, "rounds drafts"]
    output: Int[np.ndarray, "rounds block"]

    def __len__(self) -> int:
        return len(self.request)

    @property
    def k(self) -> int:
        """Tokens drafted in a round, at most."""
        return self.drafted.shape[1]

    def where(self, chosen: Bool[np.ndarray, " rounds"]) -> Rounds:
        """Some of the rounds; the requests keep their numbers."""
        arrays = {
            field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self) if field.name != "ids"
        }
        return Rounds(self.ids, **arrays)

    def of(self, requests: Iterable[str | int]) -> Rounds:
        """The rounds of requests with these ids."""
        wanted = set(requests)
        return self.where(np.isin(self.request, [at for at, name in enumerate(self.ids) if name in wanted]))

    @property
    def observed(self) -> Bool[np.ndarray, "rounds drafts"]:
        """Where it is known whether a drafted token would be kept: up to the first that was not, or to where the
        record ends."""
        end = np.where(self.cut, self.kept, np.minimum(self.kept + 1, self.verified))
        return np.arange(self.k) < end[:, None]

    @property
    def was_kept(self) -> Bool[np.ndarray, "rounds drafts"]:
        """The drafted tokens that became output."""
        return np.arange(self.k) < self.kept[:, None]


def rounds_of(recorded: Iterable[Recorded] | str | Path) -> Rounds:
    """The rounds of some requests.

    The last round of a request may be cut: its limit or a stop token came before the target's own token. How many
    drafted tokens were kept is then read from the tokens, and the rest counts for nothing.

    Args:
      recorded: completions, lines of a job's output, or the path of one; a job must have had `output.trace`.

    Raises:
      ConfigError: a line has no trace.
    """
    if isinstance(recorded, str | Path):
        recorded = _read(Path(recorded))
    ids: list[str | int] = []
    found: list[_Round] = []
    for request, one in enumerate(recorded):
        traced = one if isinstance(one, Completion) else _completion_like(one)
        ids.append(traced.id)
        found += _rounds(request, traced)
    drafts = max((len(one.block) for one in found), default=0)
    block = max((len(one.output) for one in found), default=0)

    def column(name: str, dtype: type = int) -> Any:
        return np.array([getattr(one, name) for one in found], dtype)

    return Rounds(
        ids=tuple(ids),
        **{name: column(name) for name in ("request", "number", "start", "verified", "produced", "kept")},
        drafts=np.array([len(one.block) for one in found], int),
        cut=column("cut", bool),
        drafted=_padded([one.block for one in found], drafts),
        output=_padded([one.output for one in found], max(block, drafts + 1)),
    )


@dataclasses.dataclass(frozen=True)
class _Round:
    request: int
    number: int
    start: int
    verified: int
    produced: int
    kept: int
    cut: bool
    block: tuple[int, ...]
    output: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """What of a completion is needed here."""

    id: str | int
    token_ids: Sequence[int]
    produced_per_round: Sequence[int]
    drafted_blocks: Sequence[Sequence[int]]
    verified_per_round: Sequence[int]


def _read(path: Path) -> list[Mapping[str, Any]]:
    from dflash_jax.jobs.formats import read_output
    from dflash_jax.jobs.ledger import is_refusal

    if not path.exists():
        raise ConfigError(f"{quote(str(path))} is not there; it must be the output of a job")
    return [result for result in read_output(path) if not is_refusal(result)]


def _completion_like(line: Mapping[str, Any]) -> _Traced:
    trace = line.get("trace")
    if not isinstance(trace, Mapping):
        raise ConfigError(
            f"line {quote(line.get('id'))} of the job's output has no trace; run the job with output.trace true"
        )
    blocks = trace["drafted_blocks"]
    return _Traced(
        id=line["id"],
        token_ids=line["token_ids"],
        produced_per_round=trace["produced_per_round"],
        drafted_blocks=blocks,
        verified_per_round=trace.get("verified_per_round") or [len(block) for block in blocks],
    )


def _rounds(request: int, traced: Completion | _Traced) -> list[_Round]:
    # Counted from the end: tokens that no round produced, such as a prefill's, come before those of rounds.
    at = len(traced.token_ids) - sum(traced.produced_per_round)
    rounds = zip(traced.produced_per_round, traced.drafted_blocks, traced.verified_per_round, strict=True)
    found = []
    for number, (produced, block, verified) in enumerate(rounds):
        output = tuple(traced.token_ids[at : at + produced])
        kept = 0
        while kept < min(produced, verified) and output[kept] == block[kept]:
            kept += 1
        # The target's own token always follows, unless the output ended before it.
        cut = kept == produced and verified > 0
        found.append(_Round(request, number, at, verified, produced, kept, cut, tuple(block), output))
        at += produced
    return found


def _padded(lists: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "rounds width"]:
    padded = np.full((len(lists), width), -1)
    for row, values in enumerate(lists):
        padded[row, : len(values)] = values
    return padded
