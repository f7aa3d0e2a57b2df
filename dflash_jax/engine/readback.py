"""A report as one array: what a step hands to the host is then one transfer, and not one for each field.

Log-probabilities come beside it, in the steps that have any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax.engine.steps import Report
from dflash_jax.sampling import Logprobs

_NUMBERS = ("produced", "num_drafts", "num_verified", "position", "violation")
_FLAGS = ("damaged_draft", "finished", "stopped")


class Sent(NamedTuple):
    """What a program returns of a report."""

    numbers: Int[Array, "*rounds rows numbers"]
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


def send(report: Report) -> Sent:
    """A report as a program returns it."""
    return Sent(as_array(report), report.logprobs, report.prompt_logprobs)


def receive(sent: Sent, drafts: int) -> Report:
    """On the host, the report that `send` was given, of rounds with so many drafts."""
    report, beside = report_of(np.asarray(sent.numbers), drafts), sent[1:]
    if any(part is not None for part in beside):
        report = report.replace(**dict(zip(("logprobs", "prompt_logprobs"), jax.device_get(beside), strict=True)))
    return report


def as_array(report: Report) -> Int[Array, "*rounds rows numbers"]:
    """Each row of a report as one row of numbers: its tokens, its drafts and their bins, and its single values."""
    single = [getattr(report, name)[..., None].astype(jnp.int32) for name in (*_NUMBERS, *_FLAGS)]
    return jnp.concatenate([report.tokens, report.drafts, report.bins, *single], axis=-1)


def report_of(numbers: Int[np.ndarray, "*rounds rows numbers"], drafts: int) -> Report:
    """The report that `as_array` was given, of rounds with so many drafts; its fields are views of the array."""
    tokens = numbers.shape[-1] - 2 * drafts - len(_NUMBERS) - len(_FLAGS)
    single = np.moveaxis(numbers[..., tokens + 2 * drafts :], -1, 0)
    fields: dict[str, Any] = {
        "tokens": numbers[..., :tokens],
        "drafts": numbers[..., tokens : tokens + drafts],
        "bins": numbers[..., tokens + drafts : tokens + 2 * drafts],
        **dict(zip(_NUMBERS, single[: len(_NUMBERS)], strict=True)),
        **dict(zip(_FLAGS, single[len(_NUMBERS) :].astype(bool), strict=True)),
    }
    return Report(**fields)
