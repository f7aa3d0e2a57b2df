"""Engines whose rounds verify as many drafted tokens as a test says, and the blocks they must draft."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
def blocks_along(pair: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """What is drafted after so many tokens of a greedy output: the first block of an engine whose prompt they end.

    That engine's own first token is the anchor, so it is given all tokens before that.
    """
    counts = range(1, len(output))
    asked = [(*prompt, *output[: count - 1]) for count in counts]
    completions = engine(pair).generate(asked, {"max_tokens": 2, "ignore_eos": True})
    for count, completion in zip(counts, completions, strict=True):
        assert completion.token_ids[0] == output[count - 1], "only greedy outputs can be asked for"
    return {count: each.drafted_blocks[0] for count, each in zip(counts, completions, strict=True)}


def assert_blocks_belong(pair: str, prompt: Sequence[int], completion: Completion) -> None:
    """Every drafted block is what would be drafted from the tokens before it alone."""
    along, position = blocks_along(pair, tuple(prompt), completion.token_ids), 1
    for produced, block in zip(completion.produced_per_round, completion.drafted_blocks, strict=True):
        assert not block or block == along[position], position
        position += produced
