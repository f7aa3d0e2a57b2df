"""Engines whose rounds verify as many drafted tokens as a test says, and the blocks they must draft."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from dflash_jax import Completion, Engine
from dflash_jax.engine.calibration import uncalibrated
from dflash_jax.engine.plan import Plan
from tests.pairs import engine


class Rounds:
    """A runner whose rounds are changed before they run, or whose times are made up."""

    def __init__(
        self,
        run: Any,
        change: Callable[[Plan], Plan] = lambda plan: plan,
        seconds: Callable[[Plan], float] | None = None,
    ):
        self._run, self._change, self._seconds = run, change, seconds
        self.plans: list[Plan] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def __call__(self, device, plan):
        plan = self._change(plan)
        device, report = self._run(device, plan)
        self.plans.append(plan)
        if self._seconds and plan.decodes:
            report = dataclasses.replace(report, seconds=self._seconds(plan))
        return device, report


def with_tokens(plan: Plan, tokens: int) -> Plan:
    """A plan whose rounds run so many tokens; as many as rows for no draft."""
    if not plan.drafts:
        return plan
    if tokens <= len(plan.decodes):
        return dataclasses.replace(plan, drafts=0, width=0, tokens=None)
    return dataclasses.replace(plan, tokens=tokens, chance=uncalibrated(plan.drafts).chance())


def with_budget(served: Engine, tokens: Callable[[Plan], int]) -> Engine:
    """The engine, with rounds that run so many tokens."""
    served._run = Rounds(served._run, lambda plan: with_tokens(plan, tokens(plan)))  # type: ignore[assignment]
    return served


@functools.cache
def block_after(pair: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """What is drafted after these tokens, the last of which is the anchor: an engine's first block for this prompt.

    That engine's own first token has to be the anchor, so it is given all tokens but that.
    """
    completion = fresh(pair).generate([tokens[:-1]], {"max_tokens": 2, "ignore_eos": True})[0]
    assert completion.token_ids[0] == tokens[-1], "only greedy outputs can be asked for"
    return completion.drafted_blocks[0]


@functools.cache
def fresh(pair: str) -> Engine:
    return engine(pair)


def assert_blocks_belong(pair: str, prompt: tuple[int, ...], completion: Completion) -> None:
    """Every drafted block is what would be drafted from the tokens before it alone."""
    position = 1
    for produced, block in zip(completion.produced_per_round, completion.drafted_blocks, strict=True):
        if block:
            assert block == block_after(pair, (*prompt, *completion.token_ids[:position])), position
        position += produced
