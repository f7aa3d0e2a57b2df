"""Who was where in each step: rows and slots as requests come and go, recorded while an engine runs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from dflash_jax.engine import Engine, Update
from dflash_jax.engine.host import HostState
from dflash_jax.engine.plan import Plan, make_plan


@dataclasses.dataclass(frozen=True)
class RowWork:
    """What a row of a step did.

    Attributes:
      row: in the batch of the step's chunks, or in that of its rounds.
      slot: where the request lives.
      request: its id.
      kind: "prefill" for a chunk of its prompt, "decode" for rounds.
      tokens: tokens of the chunk, or tokens that the rounds added to the output.
    """

    row: int
    slot: int
    request: str
    kind: Literal["prefill", "decode"]
    tokens: int


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
      seconds: when it was done, on the recorder's clock, from its start.
      rows: what its rows did: those of chunks, then those of rounds.
      waiting: requests without a slot after it, first to be served first.
      finished: requests that ended in it, and why.
      preempted: requests that gave their pages back in it.
    """

    seconds: float
    rows: tuple[RowWork, ...]
    waiting: tuple[str, ...]
    finished: dict[str, str]
    preempted: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The steps of a run, in order."""

    steps: tuple[StepRecord, ...]

    @property
    def requests(self) -> tuple[str, ...]:
        """Ids, in the order in which they were first in a row."""
        return tuple(dict.fromkeys(work.request for step in self.steps for work in step.rows))

    def slots(self) -> Int[np.ndarray, "steps slots"]:
        """The request, as an index into `requests`, that each slot did something for in each step; -1 for none."""
        return self._grid("slot", ("prefill", "decode"))

    def rows(self, kind: Literal["prefill", "decode"] = "decode") -> Int[np.ndarray, "steps rows"]:
        """The request that was in each row of the batch of rounds, or of chunks, in each step; -1 for none."""
        return self._grid("row", (kind,))

    def _grid(self, where: str, kinds: Sequence[str]) -> Int[np.ndarray, "steps places"]:
        number = {request: index for index, request in enumerate(self.requests)}
        width = max((getattr(work, where) + 1 for step in self.steps for work in step.rows), default=0)
        grid = np.full((len(self.steps), width), -1)
        for at, step in enumerate(self.steps):
            for work in step.rows:
                if work.kind in kinds:
                    grid[at, getattr(work, where)] = number[work.request]
        return grid


def step_record(
    before: HostState, plan: Plan, after: HostState, updates: Sequence[Update], seconds: float = 0.0
) -> StepRecord:
    """What a step did, from the host's states around it.

    Args:
      before: the state that the plan was made of.
      plan: what `make_plan` made of it.
      after: the state that `absorb` returned.
      updates: what the step brought each request.
      seconds: when.
    """
    new = {update.id: len(update.token_ids) for update in updates}
    # A prompt's last chunk makes the first token, and no round does anything for the request in that step.
    chunks = [
        RowWork(row, chunk.slot, chunk.id, "prefill", len(chunk.tokens))
        for row, chunk in enumerate(plan.chunks)
        if chunk is not None
    ]
    decodes = [
        RowWork(row, decode.slot, decode.id, "decode", new.get(decode.id, 0))
        for row, decode in enumerate(plan.decodes)
        if decode is not None
    ]
    finished = {update.id: update.completion.finish_reason for update in updates if update.completion is not None}
    preempted = [one.id for one in before.running if one.id in after.waiting]
    return StepRecord(
        seconds=seconds,
        rows=(*chunks, *decodes),
        waiting=tuple(sequence.id for sequence in after.waiting),
        finished={name: str(reason) for name, reason in finished.items()},
        preempted=tuple(preempted),
    )


class Recorder:
    """Records the steps of an engine from `start` to `stop`.

    Recording makes the plan of each step a second time, on the host; what the engine does is not changed.

    Args:
      engine: whose steps.
      clock: seconds.
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.perf_counter):
        self._engine, self._clock = engine, clock
        self._begin = clock()
        self._steps: list[StepRecord] = []
        self._unsubscribe = engine.subscribe(self._on_step)

    @property
    def timeline(self) -> Timeline:
        """What was recorded so far."""
        return Timeline(tuple(self._steps))

    def stop(self) -> Timeline:
        """Ends the recording, and returns it."""
        self._unsubscribe()
        return self.timeline

    def _on_step(self, before: HostState, after: HostState, updates: tuple[Update, ...]) -> None:
        _, plan = make_plan(before)
        self._steps.append(step_record(before, plan, after, updates, self._clock() - self._begin))


@contextlib.contextmanager
def recording(engine: Engine, *, clock: Callable[[], float] = time.perf_counter) -> Iterator[Recorder]:
    """Records an engine's steps while the block runs; `recorder.timeline` is the result."""
    recorder = Recorder(engine, clock=clock)
    try:
        yield recorder
    finally:
        recorder.stop()
