"""What drafting gains: a few prompts run with and without it, in turns, in the same engine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.acceptance import Acceptance, total_acceptance
from dflash_jax.engine import Completion, Engine
from dflash_jax.errors import DflashError
from dflash_jax.jobs.reader import Item

_PAIRS = 4
"""Ratios that are measured at least, so that their spread says something."""

_FEWEST_TOKENS = 8
"""Of each answer, however little time there is: a few rounds."""

_WARM_UP_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A group of prompts run one way: tokens after every prompt's first, and the seconds these took."""

    seconds: float
    tokens: int
    completions: list[Completion]

    @property
    def acceptance(self) -> Acceptance:
        return total_acceptance(completion.metrics for completion in self.completions)


def compare_plain(
    engine: Engine,
    items: Sequence[Item],
    *,
    max_tokens: int | None,
    clock: Callable[[], float],
    seconds: float | None = None,
    most_seconds: float | None = None,
    acceptance: Acceptance | None = None,
) -> dict[str, Any]:
    """Runs prompts plainly and with drafting, in turns, and compares the speed of decoding and the tokens.

    As many prompts as the engine has slots run at once. Each such group runs one way and directly after it the other
    way, and every second group in the opposite order, so that both ways find the machine in the same state. Few
    prompts are repeated until there are enough pairs. The first group is run for a few tokens both ways before.

    How many tokens a round brings varies from answer to answer far more than how long it takes, and `acceptance` knows
    it better than a few short runs do. So the speed of drafted runs is multiplied by how much more, or less, is
    accepted there than in the runs.

    Args:
      engine: idle, with a draft.
      items: the prompts, none of which the engine refuses.
      max_tokens: tokens of each answer at most, if that is less than the prompt's own limit.
      clock: seconds; it stands still while programs are compiled.
      seconds: what the comparison should take; answers are then shorter, but a few rounds at least.
      most_seconds: what it may take; fewer pairs are run then, but one at least.
      acceptance: in many more answers to such prompts.

    Returns:
      Requests, tokens per second of both ways, `speedup` (all drafted pairs over all plain ones), `speedup_min` and
      `speedup_max` of single pairs, `pairs`, the acceptance that was reckoned with, and how many of the greedy requests
      got the same tokens both ways.
    """
    slots = engine.config.max_slots
    groups = [items[start : start + slots] for start in range(0, len(items), slots)]
    count = max(_PAIRS, len(groups))
    # Also what is slow the first time: pages that were not touched yet, a prompt whose pages are cached nowhere.
    begin, longest = clock(), 0.0
    first = [_run(engine, [_limited(item, _WARM_UP_TOKENS) for item in groups[0]], way, clock) for way in (False, True)]
    if seconds is not None:
        token = sum(len(groups[0]) * way.seconds / way.tokens for way in first)
        affordable = max(_FEWEST_TOKENS, int(seconds / (count * token)) if token > 0 else _FEWEST_TOKENS)
        max_tokens = min(affordable, max_tokens or affordable)
    if max_tokens is not None:
        groups = [[_limited(item, max_tokens) for item in group] for group in groups]
    pairs: list[dict[bool, _Timed]] = []
    for group in itertools.islice(itertools.cycle(groups), -(-count // len(groups)) * len(groups)):
        started = clock()
        if pairs and most_seconds is not None and started - begin + longest > most_seconds:
            break
        order = (False, True) if len(pairs) % 2 == 0 else (True, False)
        pairs.append({speculation: _run(engine, group, speculation, clock) for speculation in order})
        longest = max(longest, clock() - started)
    # Seconds that the tokens would have taken, each way.
    times = [
        {False: pair[False].seconds, True: pair[True].seconds / _scale(acceptance, pair[True].acceptance)}
        for pair in pairs
    ]
    plain_rate, drafted_rate = (
        sum(pair[way].tokens for pair in pairs) / sum(time[way] for time in times) for way in (False, True)
    )
    ratios = [
        pair[True].tokens / time[True] / (pair[False].tokens / time[False])
        for pair, time in zip(pairs, times, strict=True)
    ]
    reckoned = acceptance
    if reckoned is None or reckoned.mean_acceptance_length is None:
        reckoned = sum((pair[True].acceptance for pair in pairs), Acceptance())
    once = pairs[: len(groups)]
    plain, drafted = ([c for pair in once for c in pair[way].completions] for way in (False, True))
    compared = list(zip(items, plain, drafted, strict=False))
    greedy = [(a, b) for item, a, b in compared if item.sampling.temperature == 0]
    return {
        "requests": len(compared),
        "pairs": len(pairs),
        "plain_tokens_per_s": round(plain_rate, 3),
        "drafted_tokens_per_s": round(drafted_rate, 3),
        "speedup": round(drafted_rate / plain_rate, 4),
        "speedup_min": round(min(ratios), 4),
        "speedup_max": round(max(ratios), 4),
        "mean_acceptance_length": reckoned.ratios(digits=6)["mean_acceptance_length"],
        "greedy_requests": len(greedy),
        "greedy_equal": sum(a.token_ids == b.token_ids for a, b in greedy),
    }


def _scale(wanted: Acceptance | None, measured: Acceptance) -> float:
    """How many tokens a round brings by one acceptance, over another; 1 if either is not known."""
    if wanted is None or wanted.mean_acceptance_length is None or measured.mean_acceptance_length is None:
        return 1.0
    return wanted.mean_acceptance_length / measured.mean_acceptance_length


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
    start = clock()
    ids = [
        engine.add_request(item.prompt, dataclasses.replace(item.sampling, speculation=speculation)) for item in items
    ]
    done: dict[str, Completion] = {}
    begun: set[str] = set()
    begin, tokens = start, 0
    while engine.has_work:
        prefilling = len(begun) < len(ids)
        for update in engine.step():
            begun.add(update.id)
            tokens += 0 if prefilling else len(update.token_ids)
            if update.completion is not None:
                done[update.id] = update.completion
        if prefilling:
            begin = clock()
    completions = [done[request_id] for request_id in ids]
    if not tokens:
        # Everything came with the first tokens.
        begin, tokens = start, sum(len(completion.token_ids) for completion in completions)
    return _Timed(clock() - begin, tokens, completions)
