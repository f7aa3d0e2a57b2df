"""What a diagnosis says."""

from __future__ import annotations

import dataclasses
from typing import Literal

Level = Literal["problem", "notice", "fine", "unknown"]
"""It costs acceptance; it may; it was checked and does not; it could not be checked."""

_ORDER: tuple[Level, ...] = ("problem", "notice", "fine", "unknown")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      cause: its name.
      level: what it means for acceptance.
      sentence: what was found, with the figures, and what to do.
    """

    cause: str
    level: Level
    sentence: str

    def __str__(self) -> str:
        return f"{self.level}: {self.cause}: {self.sentence}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All that was found, problems first."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What costs acceptance."""
        return tuple(finding for finding in self.findings if finding.level == "problem")

    def of(self, cause: str) -> Finding | None:
        """The finding about a cause; None if nothing was said about it."""
        return next((finding for finding in self.findings if finding.cause == cause), None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def diagnosis(findings: list[Finding]) -> Diagnosis:
    """The findings in order."""
    return Diagnosis(tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.level))))
