"""Which lines an output has results of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dflash_jax.jobs.disk_map import DiskMap

Result = dict[str, Any]
"""What a job says about an input line."""


def is_refusal(result: Result) -> bool:
    """Whether a result says that an input line could not be run, rather than what came of running it."""
    return result.get("finish_reason") == "error" and "line" in result


class Ledger:
    """The ids of answers, and the refusals that hold, of an output of any format.

    Attributes:
      answered: ids of answers.
      refusals: by id, the last one of each.
    """

    def __init__(self) -> None:
        self.answered = DiskMap()
        self.refusals = DiskMap()

    def add(self, result: Result) -> bool:
        """Notes a result, and returns whether it says something new."""
        key = str(result["id"])
        if not is_refusal(result):
            self.answered[key] = None
            return True
        if self.refusals.get(key) == result:
            return False
        self.refusals[key] = result
        return True

    def holds(self, result: Result, ids: Collection[str]) -> bool:
        """Whether a result is to stay when only the refusals of these ids are."""
        key = str(result["id"])
        return not is_refusal(result) or (key in ids and self.refusals.get(key) == result)

    def forget_refusals(self, ids: Collection[str]) -> None:
        """Forgets the refusals of all but these ids."""
        for key in [key for key in self.refusals if key not in ids]:
            del self.refusals[key]

    def clear(self) -> None:
        """Forgets everything."""
        self.answered.clear()
        self.refusals.clear()
