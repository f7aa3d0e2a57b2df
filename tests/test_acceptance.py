"""Acceptance is counted and divided in one place, with one answer where nothing was drafted."""

from __future__ import annotations

import dataclasses

from dflash_jax.acceptance import Acceptance, total_acceptance
from dflash_jax.bench.sweep import Run, figures
from dflash_jax.engine.output import Completion, Metrics
from dflash_jax.jobs import summary
from dflash_jax.jobs.results import NO_METRICS

METRICS = dataclasses.replace(NO_METRICS, drafts_proposed=14, drafts_accepted=5, drafted_request_steps=2)


def test_counts_of_requests_add_up_from_metrics_and_from_results():
    assert total_acceptance([METRICS, {"drafts_proposed": 6, "drafts_accepted": None}]) == Acceptance(20, 5, 2)
    assert Acceptance(20, 5, 2).accept_rate == 0.25
    assert Acceptance(20, 5, 2).mean_acceptance_length == 3.5
    assert Acceptance(3, 1, 3).ratios(digits=2) == {"accept_rate": 0.33, "mean_acceptance_length": 1.33}


def test_where_nothing_was_drafted_every_figure_is_none():
    nothing = {"accept_rate": None, "mean_acceptance_length": None}
    assert Acceptance().ratios() == Acceptance().ratios(digits=3) == nothing
    plain = Completion("a", 1, (1,), None, "length", None, None, METRICS, (), ())
    plain = Completion(**{**vars(plain), "metrics": Metrics(**{**vars(METRICS), **Acceptance().counts()})})
    of_job = summary.figures([{"id": "a", "finish_reason": "length", "metrics": vars(plain.metrics)}])
    of_sweep = figures([Run(1.0, (plain,)), Run(1.0, (plain,))], output_tokens=1)
    for found in (of_job, of_sweep):
        assert {name: found[name] for name in nothing} == nothing
