"""What drafting gains: a few prompts run with and without it, in turns, in the same engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.acceptance import Acceptance, total_acceptance
from dflash_jax.engine import Completion, Engine
from dflash_jax.errors import DflashError
from dflash_jax.jobs.reader import Item

_PAIRS = 4
"""Ratios that are measured at least, so that their spread says something."""

_WARM_UP_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class _Timed:
    seconds: float
    completions: list[Completion]

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def compare_plain(
    engine: Engine, items: Sequence[Item], *, max_tokens: int | None, clock: Callable[[], float]
) -> dict[str, Any]:
    """Runs prompts plainly and with drafting, in turns, and compares speed and tokens.

    As many prompts as the engine has slots run at once. Each such group runs one way and directly after it the other
    way, and every second group in the opposite order, so that both ways find the machine in the same state. Few
    prompts are repeated until there are enough pairs. Before it is timed a prompt is run for a few
    tokens both ways: its programs are then loaded, and its pages in the prefix cache, if there is one.

    Args:
      engine: idle, with a draft.
      items: the prompts, none of which the engine refuses.
      max_tokens: tokens of each answer at most, if that is less than the prompt's own limit.
      clock: seconds; it stands still while programs are compiled.

    Returns:
      Requests, tokens per second of both ways, `speedup` (all drafted pairs over all plain ones), `speedup_min` and
      `speedup_max` of single pairs, `pairs`, the acceptance in the drafted runs, and how many of the greedy requests
      got the same tokens both ways.
    """
    if max_tokens is not None:
        items = [_limited(item, max_tokens) for item in items]
    slots = engine.config.max_slots
    groups = [items[start : start + slots] for start in range(0, len(items), slots)]
    for group in groups:
        for speculation in (False, True):
            _run(engine, [_limited(item, _WARM_UP_TOKENS) for item in group], speculation, clock)
    pairs: list[dict[bool, _Timed]] = []
    while len(pairs) < max(_PAIRS, len(groups)):
        for group in groups:
            order = (False, True) if len(pairs) % 2 == 0 else (True, False)
            pairs.append({speculation: _run(engine, group, speculation, clock) for speculation in order})
    plain_rate, drafted_rate = (
        sum(pair[way].tokens for pair in pairs) / sum(pair[way].seconds for pair in pairs) for way in (False, True)
    )
    ratios = [pair[True].rate / pair[False].rate for pair in pairs]
    once = pairs[: len(groups)]
    plain, drafted = ([c for pair in once for c in pair[way].completions] for way in (False, True))
    greedy = [(a, b) for item, a, b in zip(items, plain, drafted, strict=True) if item.sampling.temperature == 0]
    acceptance: Acceptance = total_acceptance(completion.metrics for completion in drafted)
    return {
        "requests": len(items),
        "pairs": len(pairs),
        "plain_tokens_per_s": round(plain_rate, 3),
        "drafted_tokens_per_s": round(drafted_rate, 3),
        "speedup": round(drafted_rate / plain_rate, 4),
        "speedup_min": round(min(ratios), 4),
        "speedup_max": round(max(ratios), 4),
        "mean_acceptance_length": acceptance.ratios(digits=6)["mean_acceptance_length"],
        "greedy_requests": len(greedy),
        "greedy_equal": sum(a.token_ids == b.token_ids for a, b in greedy),
    }


def check_lossless(comparison: dict[str, Any], dtype: str) -> None:
    """Raises DflashError if drafting changed greedy tokens.

    In bfloat16 the two ways may round differently, if only because one found more of a prompt in the prefix cache, and
    then break near ties differently, so there it is not an error.
    """
    equal, greedy = comparison["greedy_equal"], comparison["greedy_requests"]
    if dtype == "float32" and equal < greedy:
        raise DflashError(
            f"{greedy - equal} of {greedy} greedy requests got other tokens with drafting than without; "
            "speculation must not change what is generated"
        )


def _limited(item: Item, max_tokens: int) -> Item:
    limit = min(item.sampling.max_tokens, max_tokens)
    return dataclasses.replace(item, sampling=dataclasses.replace(item.sampling, max_tokens=limit))


def _run(engine: Engine, items: Sequence[Item], speculation: bool, clock: Callable[[], float]) -> _Timed:
    begin = clock()
    ids = [
        engine.add_request(item.prompt, dataclasses.replace(item.sampling, speculation=speculation)) for item in items
    ]
    done: dict[str, Completion] = {}
    while engine.has_work:
        done.update((u.id, u.completion) for u in engine.step() if u.completion is not None)
    return _Timed(clock() - begin, [done[request_id] for request_id in ids])
