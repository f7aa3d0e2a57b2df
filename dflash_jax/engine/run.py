"""The step: plan, run, absorb. `Runner` is the only part of it that touches the device."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dflash_jax.engine.absorb import absorb
from dflash_jax.engine.device import compiler_options
from dflash_jax.engine.host import HostState
from dflash_jax.engine.identity import ModelIdentity, ModelsIdentity, identify
from dflash_jax.engine.inputs import DecodeInputs, PrefillInputs, decode_inputs, prefill_inputs
from dflash_jax.engine.logprob_records import size_for
from dflash_jax.engine.output import Update
from dflash_jax.engine.plan import Chunk, Decode, Plan, make_plan
from dflash_jax.engine.readback import receive, send
from dflash_jax.engine.reader import NO_TEXT, Reader
from dflash_jax.engine.slots import give_pages, open_slots, save_checkpoints
from dflash_jax.engine.state import EngineState, Models, Rows, mark_donated
from dflash_jax.engine.steps import Report, prefill, run_rounds
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.programs import Bound, Program, prepare


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What the device did in a step, on the host.

    Attributes:
      prefill: of the plan's chunks, row by row; None if there were none.
      decode: of its rounds, stacked on a leading axis; None if there were none.
      seconds: the rounds took; None where that says nothing: beside chunks, and the first time a program runs.
    """

    prefill: Report | None = None
    decode: Report | None = None
    seconds: float | None = None


def step(
    run: Callable[[EngineState, Plan], tuple[EngineState, StepReport]],
    host: HostState,
    device: EngineState,
    clock: Callable[[], float],
    read: Reader = NO_TEXT,
) -> tuple[HostState, EngineState, tuple[Update, ...]]:
    """One step of the engine: admits, prefills, runs rounds, and takes in what came of it.

    Args:
      run: a `Runner`.
      host, device: the engine's two halves. `device` is used up if the runner donates.
      clock: seconds; when the step's tokens are counted as seen.
      read: makes text of tokens; see `absorb`.

    Returns:
      Both halves after the step, and what it brought each request.

    Raises:
      InvariantError: an invariant does not hold, of the page account or, in a strict engine, of a request.
    """
    host, plan = make_plan(host)
    device, report = run(device, plan)
    host, updates = absorb(host, plan, report, clock(), read)
    return host, device, updates


class Runner:
    """Runs plans: one dispatch for a plan's chunks, one for its rounds.

    Compiled once for each number of rows, width of chunks, and number of drafted and of verified tokens.
    """

    def __init__(
        self,
        models: Models,
        *,
        donate: bool = False,
        implementation: Implementation | None = None,
        target: ModelIdentity | None = None,
    ):
        """Makes a runner.

        Args:
          models: target and draft, as `engine.device.prepare` lays them out.
          donate: reuse the memory of the state that is run, which is then gone.
          implementation: of the kernels; see `kernels.dispatch`.
          target: the target's identity, if it is known.
        """
        self.models = models
        self.donate = donate
        self.implementation: Implementation | None = implementation
        self._target = target
        self._run_before: set[tuple[int | None, ...]] = set()

    @functools.cached_property
    def identity(self) -> ModelsIdentity:
        """The identity of the models, by content."""
        return identify(self.models, self._target)

    def __call__(self, device: EngineState, plan: Plan) -> tuple[EngineState, StepReport]:
        """The device state after a plan, and what happened in it.

        Rows that are ready to decode do so in the second dispatch; a prompt that ends in the first is not
        among them.
        """
        before, prefilled, decoded, begin = device, None, None, time.perf_counter()
        if plan.chunks:
            device, prefilled = self._prefill(device, plan)()
        if plan.decodes:
            device, decoded = self._decode(device, plan)()
        if self.donate and device is not before:
            mark_donated(before)
        chunks = None if prefilled is None else receive(prefilled, 0)
        rounds = None if decoded is None else receive(decoded, plan.drafts)
        return device, StepReport(chunks, rounds, self._time(plan, begin))

    def _time(self, plan: Plan, begin: float) -> float | None:
        """Seconds since `begin`, if they are those of a plan's rounds and of nothing else."""
        program = (len(plan.decodes), plan.table_width, plan.drafts, plan.tokens, plan.rounds, _logprobs(plan.decodes))
        known = program in self._run_before
        self._run_before.add(program)
        return time.perf_counter() - begin if known and not plan.chunks else None

    def prepare(self, device: EngineState, plans: Sequence[Plan]) -> None:
        """Compiles, several programs at once, what plans of these shapes need; what is compiled is let be."""
        wanted = [self._prefill(device, plan) for plan in plans if plan.chunks]
        wanted += [self._decode(device, plan) for plan in plans if plan.decodes]
        prepare(wanted)

    def _prefill(self, device: EngineState, plan: Plan) -> Bound:
        inputs = prefill_inputs(plan.chunks, plan.chunk_width, device.slots.block_table.shape[1])
        return Bound(
            _prefill_program(self.donate),
            (self.models, _with_rows(device, plan.chunks), inputs),
            {
                "logprobs": _logprobs(plan.chunks),
                "prompt_logprobs": size_for(None if chunk is None else chunk.prompt_logprobs for chunk in plan.chunks),
                "implementation": self.implementation,
            },
        )

    def _decode(self, device: EngineState, plan: Plan) -> Bound:
        settings = {name: getattr(plan, name) for name in ("drafts", "width", "tokens", "rounds")}
        return Bound(
            _decode_program(self.donate),
            (self.models, _with_rows(device, plan.decodes), decode_inputs(plan)),
            {**settings, "logprobs": _logprobs(plan.decodes), "implementation": self.implementation},
        )


def place_rounds(device: EngineState, plan: Plan) -> EngineState:
    """The device state that `run_round` can be applied to for a plan's rounds: its rows, with their new pages."""
    return give_pages(device, decode_inputs(plan))


def _logprobs(rows: tuple[Chunk | Decode | None, ...]) -> int | None:
    """How many of the most likely tokens the rows' program finds for each new token; None finds none."""
    return size_for(None if row is None else row.logprobs for row in rows)


def _with_rows(device: EngineState, rows: tuple) -> EngineState:
    """The state with as many rows as the step has, which gives them their slots.

    With those of the step before it, each pair of counts would be compiled for itself.
    """
    none: Any = np.full(len(rows), -1, np.int32)
    return device.replace(rows=Rows(none))


def _run_chunks(models: Models, state: EngineState, inputs: PrefillInputs, **settings):
    state = open_slots(state, inputs)
    state, report = prefill(
        models,
        state,
        inputs.tokens,
        inputs.q_len,
        inputs.last,
        inputs.known_next,
        inputs.following,
        **settings,
    )
    return save_checkpoints(state, inputs.saves), send(report)


def _run_decodes(models: Models, state: EngineState, inputs: DecodeInputs, **settings):
    state, report = run_rounds(models, give_pages(state, inputs), inputs.chance, **settings)
    return state, send(report)


@functools.cache
def _prefill_program(donate: bool) -> Program:
    return Program(
        _run_chunks,
        static=("logprobs", "prompt_logprobs", "implementation"),
        donate=("state",) if donate else (),
        compiler_options=compiler_options(),
    )


@functools.cache
def _decode_program(donate: bool) -> Program:
    return Program(
        _run_decodes,
        static=("drafts", "width", "tokens", "rounds", "logprobs", "implementation"),
        donate=("state",) if donate else (),
        compiler_options=compiler_options(),
    )
