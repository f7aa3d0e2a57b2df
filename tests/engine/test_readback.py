"""A report reaches the host as one array."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflash_jax.engine.readback import as_array, report_of
from dflash_jax.engine.steps import Report


@pytest.mark.parametrize("rounds", [(), (4,)])
@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_a_report_comes_back_as_it_was(rounds, drafts):
    draw = np.random.default_rng(0)
    shape = (*rounds, 3)

    def numbers(*width: int) -> np.ndarray:
        return draw.integers(0, 1 << 30, (*shape, *width), np.int32)

    report = Report(
        tokens=numbers(1 + drafts // 2),
        produced=numbers(),
        drafts=numbers(drafts),
        num_drafts=numbers(),
        num_verified=numbers(),
        bins=numbers(drafts),
        damaged_draft=draw.random(shape) > 0.5,
        position=numbers(),
        finished=draw.random(shape) > 0.5,
        stopped=draw.random(shape) > 0.5,
        violation=numbers(),
    )
    back = report_of(np.asarray(as_array(report)), drafts)
    for field in dataclasses.fields(Report):
        sent, came = getattr(report, field.name), getattr(back, field.name)
        assert came.dtype == sent.dtype, field.name
        np.testing.assert_array_equal(came, sent, field.name)
