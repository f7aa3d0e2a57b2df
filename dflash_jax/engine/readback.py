"""A report as one array: what a step hands to the host is then one transfer, and not one for each field."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax.engine.steps import Report

_NUMBERS = ("produced", "num_drafts", "position", "violation")
_FLAGS = ("damaged_draft", "finished", "stopped")


def as_array(report: Report) -> Int[Array, "*rounds rows numbers"]:
    """Each row of a report as one row of numbers: its tokens, its drafts, and its single values."""
    single = [getattr(report, name)[..., None].astype(jnp.int32) for name in (*_NUMBERS, *_FLAGS)]
    return jnp.concatenate([report.tokens, report.drafts, *single], axis=-1)


def report_of(numbers: Int[np.ndarray, "*rounds rows numbers"]) -> Report:
    """The report that `as_array` was given; its fields are views of the array. There is one draft less than tokens."""
    tokens = (numbers.shape[-1] - len(_NUMBERS) - len(_FLAGS) + 1) // 2
    single = np.moveaxis(numbers[..., 2 * tokens - 1 :], -1, 0)
    fields: dict[str, Any] = {
        "tokens": numbers[..., :tokens],
        "drafts": numbers[..., tokens : 2 * tokens - 1],
        **dict(zip(_NUMBERS, single[: len(_NUMBERS)], strict=True)),
        **dict(zip(_FLAGS, single[len(_NUMBERS) :].astype(bool), strict=True)),
    }
    return Report(**fields)
