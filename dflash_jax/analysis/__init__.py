"""Looking at speculation: the next round, acceptance, what other settings would bring, replays, and what is wrong.

Functions of engines, states, completions and job outputs that return arrays and plain records; `dflash_jax.plots`
draws these. Nothing here changes the engine that it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_jax.lazy import lazy_exports

if TYPE_CHECKING:
    from dflash_jax.analysis.acceptance import (
        AcceptanceOverTime,
        KindAcceptance,
        PositionAcceptance,
        by_kind,
        by_position,
        heat_map,
        over_time,
    )
    from dflash_jax.analysis.comparing import Comparison, compare
    from dflash_jax.analysis.differences import Difference, diff, request_view
    from dflash_jax.analysis.doctor import Diagnosis, Finding, diagnose
    from dflash_jax.analysis.kinds import token_kinds
    from dflash_jax.analysis.lattice import Lattice, peek, peek_state
    from dflash_jax.analysis.replays import finish, replay
    from dflash_jax.analysis.rounds import Rounds, rounds_of
    from dflash_jax.analysis.speed_ups import WhatIf, linear_cost, measured_cost, what_if
    from dflash_jax.analysis.timeline import Recorder, Timeline, recording, step_record

_EXPORTS = {
    "acceptance": [
        "AcceptanceOverTime",
        "KindAcceptance",
        "PositionAcceptance",
        "by_kind",
        "by_position",
        "heat_map",
        "over_time",
    ],
    "comparing": ["Comparison", "compare"],
    "doctor": ["Diagnosis", "Finding", "diagnose"],
    "differences": ["Difference", "diff", "request_view"],
    "kinds": ["token_kinds"],
    "lattice": ["Lattice", "peek", "peek_state"],
    "replays": ["finish", "replay"],
    "rounds": ["Rounds", "rounds_of"],
    "timeline": ["Recorder", "Timeline", "recording", "step_record"],
    "speed_ups": ["WhatIf", "linear_cost", "measured_cost", "what_if"],
}

__all__ = [
    "AcceptanceOverTime",
    "Comparison",
    "Diagnosis",
    "Difference",
    "Finding",
    "KindAcceptance",
    "Lattice",
    "PositionAcceptance",
    "Recorder",
    "Rounds",
    "Timeline",
    "WhatIf",
    "by_kind",
    "by_position",
    "compare",
    "diagnose",
    "diff",
    "finish",
    "heat_map",
    "linear_cost",
    "measured_cost",
    "over_time",
    "peek",
    "peek_state",
    "recording",
    "replay",
    "request_view",
    "rounds_of",
    "step_record",
    "token_kinds",
    "what_if",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
