"""The step: plan, run, absorb. `Runner` is the only part of it that touches the device."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.engine.absorb import absorb
from dflash_jax.engine.device import compiler_options
from dflash_jax.engine.grammars import Constraint, Grammars
from dflash_jax.engine.host import HostState
from dflash_jax.engine.identity import ModelIdentity, ModelsIdentity, identify
from dflash_jax.engine.inputs import DecodeInputs, PrefillInputs, decode_inputs, prefill_inputs
from dflash_jax.engine.logprob_records import size_for
from dflash_jax.engine.output import Update
from dflash_jax.engine.plan import Chunk, Decode, Plan, constraints_of, make_plan, needs_processors
from dflash_jax.engine.readback import receive, send
from dflash_jax.engine.reader import NO_TEXT, Reader
from dflash_jax.engine.slots import give_pages, open_slots, save_checkpoints
from dflash_jax.engine.state import EngineState, Models, Rows, mark_donated, room_of, with_processors
from dflash_jax.engine.steps import Report, prefill, propose, run_round, run_rounds
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models.drafters import Proposal, without_damage
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

    Compiled once for each number of rows, width of chunks, and number of drafted and of verified tokens; and once
    more for each of these with logits processors.
    """

    def __init__(
        self,
        models: Models,
        *,
        donate: bool = False,
        implementation: Implementation | None = None,
        target: ModelIdentity | None = None,
        grammars: Grammars | None = None,
    ):
        """Makes a runner.

        Args:
          models: target and draft, as `engine.device.prepare` lays them out.
          donate: reuse the memory of the state that is run, which is then gone.
          implementation: of the kernels; see `kernels.dispatch`.
          target: the target's identity, if it is known.
          grammars: of requests with structured output.
        """
        self.models = models
        self.donate = donate
        self.implementation: Implementation | None = implementation
        self._target = target
        self.grammars = grammars
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
            after, prefilled = self._prefill(device, plan)()
            device = _with_kept_processors(after, device)
        if plan.decodes:
            constraints = constraints_of(plan.decodes)
            run = self._decode(device, plan) if constraints is None else self._follow(device, plan, constraints)
            after, decoded = run()
            device = _with_kept_processors(after, device)
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
        changed = needs_processors(plan.decodes) or constraints_of(plan.decodes) is not None
        alone = not plan.chunks and not changed
        return time.perf_counter() - begin if known and alone else None

    def prepare(self, device: EngineState, plans: Sequence[Plan]) -> None:
        """Compiles, several programs at once, what plans of these shapes need; what is compiled is let be."""
        wanted = [self._prefill(device, plan) for plan in plans if plan.chunks]
        wanted += [self._decode(device, plan) for plan in plans if plan.decodes]
        prepare(wanted)

    def _prefill(self, device: EngineState, plan: Plan) -> Bound:
        room = room_of(self.models, device) if needs_processors(plan.chunks) else None
        inputs = prefill_inputs(plan.chunks, plan.chunk_width, device.slots.block_table.shape[1], room)
        constraints = constraints_of(plan.chunks)
        if constraints is not None:
            assert self.grammars is not None, "a request has structured output, and the runner no grammars"
            inputs = inputs.replace(masks=self.grammars.first_masks(constraints))
        return Bound(
            _prefill_program(self.donate),
            (self.models, _with_rows(self._with_processors(device, plan.chunks), plan.chunks), inputs),
            {
                "logprobs": _logprobs(plan.chunks),
                "prompt_logprobs": size_for(None if chunk is None else chunk.prompt_logprobs for chunk in plan.chunks),
                "implementation": self.implementation,
            },
        )

    def _decode(self, device: EngineState, plan: Plan) -> Bound:
        device = self._with_processors(device, plan.decodes)
        settings = {name: getattr(plan, name) for name in ("drafts", "width", "tokens", "rounds")}
        return Bound(
            _decode_program(self.donate),
            (self.models, _with_rows(device, plan.decodes), decode_inputs(plan)),
            {**settings, "logprobs": _logprobs(plan.decodes), "implementation": self.implementation},
        )

    def _follow(self, device: EngineState, plan: Plan, constraints: list[Constraint | None]) -> Bound:
        """A round in two dispatches: between them the host follows the drafted blocks in the rows' grammars."""
        assert self.grammars is not None, "a request has structured output, and the runner no grammars"
        assert plan.rounds == 1, "what a grammar allows next is known only after each round"
        decode, block = self._decode(device, plan), None
        models, state, inputs = decode.args
        if plan.drafts:
            settings = {"drafts": plan.drafts, "implementation": self.implementation}
            block = jax.device_get(_propose_program()(models, state, inputs, **settings))
        width = min(plan.width, plan.drafts)
        block, masks = self.grammars.follow(constraints, block, width)
        settings = {name: value for name, value in decode.static.items() if name != "rounds"}
        return Bound(_follow_program(self.donate), (models, state, inputs, block, masks), settings)

    def _with_processors(self, device: EngineState, rows: tuple) -> EngineState:
        """The state with logits processors if some row needs them, and else without any, whoever had some before.

        Programs without them are then the same whether or not there ever was such a request.
        """
        return with_processors(self.models, device) if needs_processors(rows) else device.replace(processors=None)


def _with_kept_processors(after: EngineState, before: EngineState) -> EngineState:
    """The state after a program, with the processors of the state before it if the program had none."""
    if after.processors is not None or before.processors is None:
        return after
    # Nodes of their own: those of the state before may be marked as donated.
    return after.replace(processors=jax.tree.map(lambda leaf: leaf, before.processors))


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
        masks=inputs.masks,
        **settings,
    )
    return save_checkpoints(state, inputs.saves), send(report)


def _run_decodes(models: Models, state: EngineState, inputs: DecodeInputs, **settings):
    state, report = run_rounds(models, give_pages(state, inputs), inputs.chance, **settings)
    return state, send(report)


def _propose(models: Models, state: EngineState, inputs: DecodeInputs, **settings) -> Proposal:
    state = give_pages(state, inputs)
    block = propose(models, state, **settings)
    mended, _ = without_damage(block, models.target_config.vocab_size)
    # q stays as it was, so that the round still sees the damage.
    return mended.replace(probs=block.probs)


def _run_followed(models: Models, state: EngineState, inputs: DecodeInputs, block: Proposal | None, masks, **settings):
    state = give_pages(state, inputs)
    state, report = run_round(models, state, inputs.chance, block=block, masks=masks, **settings)
    return state, send(jax.tree.map(lambda leaf: leaf[None], report))


@functools.cache
def _propose_program() -> Program:
    return Program(_propose, static=("drafts", "implementation"), compiler_options=compiler_options())


@functools.cache
def _follow_program(donate: bool) -> Program:
    return Program(
        _run_followed,
        static=("drafts", "width", "tokens", "logprobs", "implementation"),
        donate=("state",) if donate else (),
        compiler_options=compiler_options(),
    )


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
