"""Rounds of several engines in alternation, so that what else the machine does disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from dflash_jax import Engine


def print_rounds(what: str, engines: Mapping[int, Engine], rounds: int) -> None:
    """Prints each engine's median time of a round, and its ratio to the first one's.

    Args:
      what: the engines differ in.
      engines: by that number.
      rounds: of each.
    """
    times: dict[int, list[float]] = {number: [] for number in engines}
    for _ in range(rounds):
        for number, engine in engines.items():
            begin = time.perf_counter()
            engine.step()
            times[number].append(time.perf_counter() - begin)
    medians = {number: statistics.median(seen) for number, seen in times.items()}
    print(f"{what:>8} {'round ms':>9} {'ratio':>6}")
    for number, median in medians.items():
        print(f"{number:>8} {1e3 * median:>9.2f} {median / next(iter(medians.values())):>6.3f}")
