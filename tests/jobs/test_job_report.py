"""What a job tells of itself: acceptance by position, the speed of its runs, a picture."""

from __future__ import annotations

import json

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.jobs.positions import Positions, positions_in, positions_of
from dflash_jax.jobs.report import position_table, read_report, run_table, write_plot
from dflash_jax.jobs.spread import Spread
from tests.jobs.recall_job import CASES, prompt


class Told:
    """A completion of some rounds: tokens produced, tokens verified, the drafted block."""

    def __init__(self, *rounds, last=None):
        self.produced_per_round = tuple(produced for produced, _, _ in rounds)
        self.verified_per_round = tuple(verified for _, verified, _ in rounds)
        self.drafted_blocks = tuple(block for _, _, block in rounds)
        self.token_ids = (0, last)


def test_a_position_counts_where_all_before_it_were_kept():
    # Two kept and the third refused; none kept; all kept.
    told = Told((3, 3, (1, 2, 3)), (1, 3, (1, 2, 3)), (4, 3, (1, 2, 3)), last=9)
    assert positions_of(told) == Positions((3, 2, 2), (2, 2, 1))


def test_a_round_without_a_draft_counts_nothing():
    assert positions_of(Told((1, 0, ()), (1, 0, ()), last=1)) == Positions()


def test_a_cut_last_round_counts_as_far_as_it_is_known():
    # The second drafted token became the last of the output: what came after it is not known.
    assert positions_of(Told((2, 3, (7, 8, 9)), last=8)) == Positions((1, 1, 0), (1, 1, 0))
    # The target's own token came in its place.
    assert positions_of(Told((2, 3, (7, 8, 9)), last=5)) == Positions((1, 1, 0), (1, 0, 0))


def test_positions_add_up_and_what_is_none_counts_nothing():
    assert Positions((2,), (1,)) + Positions((1, 1), (1, 0)) == Positions((3, 1), (2, 0))
    assert Positions((4, 0), (1, 0)).rates() == [0.25, None]
    for row in ({}, {"positions": 3}, {"positions": {"reached": [1], "kept": []}}, {"positions": {"reached": ["x"]}}):
        assert positions_in(row) == Positions()


def test_the_summary_has_acceptance_by_position_that_the_traces_bear_out(job):
    found = job.run("output.trace=true")["acceptance_by_position"]
    reached, kept = [0] * 7, [0] * 7
    for row in job.rows():
        trace, start = row["trace"], 1
        for produced, block, verified in zip(*(trace[name] for name in NAMES), strict=True):
            said = row["token_ids"][start : start + produced]
            start += produced
            for place, token in enumerate(said[:verified]):
                reached[place] += 1
                if token != block[place]:
                    break
                kept[place] += 1
        assert start == len(row["token_ids"])
    assert (found["reached"], found["kept"]) == (reached, kept)
    assert found["rate"][0] == round(kept[0] / reached[0], 6) and kept[0] > 0


NAMES = ("produced_per_round", "drafted_blocks", "verified_per_round")


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_report_tells_of_positions_and_runs_and_draws_a_picture(job, name):
    path = job.directory / name
    job.prompts(*(prompt(n, n) for n in range(2)))
    job.run(f"output.path={path}")
    job.prompts(*(prompt(n, n) for n in range(len(CASES))))
    summary = job.run(f"output.path={path}")
    found = read_report(path)
    assert found["acceptance_by_position"] == summary["acceptance_by_position"]
    assert found["output_tokens"] == summary["output_tokens"] and sum(found["lengths"].values()) == len(CASES)
    assert len(found["runs"]) == 2 and run_table(found).row_count == 2
    assert position_table(found).row_count == 7
    write_plot(found, job.directory / "out.png")
    assert (job.directory / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_rows_without_positions_and_without_a_summary(job):
    job.output.write_text(json.dumps({"id": 1, "finish_reason": "stop", "token_ids": [1]}) + "\n")
    found = read_report(job.output)
    assert position_table(found) is None and run_table(found) is None and found["requests"]["total"] == 1
    write_plot(found, job.directory / "out.png")


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no output .*absent"):
        read_report(tmp_path / "absent")


def test_quantiles_are_those_of_the_values_within_a_thousandth():
    spread, values = Spread(), [0.001 * 1.01**n for n in range(1001)]
    assert spread.figures() is None
    for value in values:
        spread.add(value)
    found = spread.figures()
    assert found["mean"] == pytest.approx(sum(values) / 1001, rel=1e-5)
    assert found["p50"] == pytest.approx(values[500], rel=1e-3)
    assert found["p95"] == pytest.approx(values[950], rel=1e-3)
    zero = Spread()
    zero.add(0.0)
    assert zero.figures() == {"mean": 0.0, "p50": 0.0, "p95": 0.0}
