"""Results, the lines of the output: one for each input line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dflash_jax.engine.logprob_records import TokenLogprob, TopLogprob
from dflash_jax.engine.output import Completion, Metrics
from dflash_jax.jobs.ledger import Result
from dflash_jax.jobs.positions import Positions, positions_of

NO_METRICS = Metrics(
    drafts_proposed=0,
    drafts_accepted=0,
    drafted_request_steps=0,
    accept_rate=None,
    mean_acceptance_length=None,
    ttft_s=None,
    tpot_s=None,
    preemptions=0,
    cached_tokens=0,
)
"""Of a request that did not run."""


def answer(item_id: str | int, completion: Completion, *, trace: bool) -> Result:
    """The result of a request that ran; with several samples, the first one's with all of them in it."""
    result: Result = {
        "id": item_id,
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "metrics": _plain(completion.metrics),
        "fallback": completion.fallback,
        "positions": positions_of(completion).counts(),
    }
    if completion.error is not None:
        result["error"] = completion.error
    if trace:
        result["trace"] = {
            "produced_per_round": list(completion.produced_per_round),
            "drafted_blocks": [list(block) for block in completion.drafted_blocks],
            "verified_per_round": list(completion.verified_per_round),
        }
    for name, found in (("logprobs", completion.logprobs), ("prompt_logprobs", completion.prompt_logprobs)):
        if found is not None:
            result[name] = [None if one is None else _logprob(one) for one in found]
    if completion.others:
        first = answer(item_id, dataclasses.replace(completion, others=()), trace=trace)
        result["samples"] = [first, *(answer(each.id, each, trace=trace) for each in completion.others)]
        for sample in result["samples"]:
            del sample["id"]
    return result


def _logprob(record: TokenLogprob | TopLogprob) -> dict[str, Any]:
    """A record of log-probabilities; a token that the model gives no chance at all has null."""
    values = record._asdict()
    # As many digits as float32 has.
    values["logprob"] = float(f"{record.logprob:.7g}") if math.isfinite(record.logprob) else None
    if isinstance(record, TokenLogprob):
        values["top"] = [_logprob(one) for one in record.top]
    return values


def refusal(item_id: str | int, line: int, error: str, *, trace: bool, row: str = "line") -> Result:
    """The result of an input line that cannot be run."""
    result: Result = {
        "id": item_id,
        "token_ids": [],
        "text": None,
        "finish_reason": "error",
        "prompt_tokens": 0,
        "metrics": _plain(NO_METRICS),
        "fallback": None,
        "positions": Positions().counts(),
        "line": line,
        "error": f"{row} {line}: {error}",
    }
    if trace:
        result["trace"] = {"produced_per_round": [], "drafted_blocks": [], "verified_per_round": []}
    return result


def _plain(metrics: Metrics) -> dict[str, float | int | None]:
    values = dataclasses.asdict(metrics)
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
