"""A job with snapshots goes on in the middle of its requests."""

from __future__ import annotations

import pytest

from dflash_jax.engine import Engine
from dflash_jax.errors import InvariantError
from dflash_jax.jobs.console import JobConsole
from dflash_jax.signals import Stop
from tests.jobs.recall_job import CASES, prompt
from tests.jobs.test_job_generate import Sabotaged

EACH_STEP = ("output.trace=true", "output.checkpoint_every=1e-9")
AT_THE_END = ("output.trace=true", "output.checkpoint_every=3600")


class Killed(BaseException):
    """Nothing the job could catch and tidy up after."""


class Watch(JobConsole):
    """Keeps the notes; ends the job after so many steps' tokens or answers, in the way it is told to."""

    def __init__(self, *, die_after_tokens=None, die_after_answers=None, stop_after_answers=None):
        super().__init__(quiet=True)
        self.stop, self.notes = Stop(), []
        self._tokens, self._answers, self._stop_after = die_after_tokens, die_after_answers, stop_after_answers
        self._done = 0

    def note(self, text):
        self.notes.append(text)

    @property
    def said(self):
        return "\n".join(self.notes)

    def tokens(self, count):
        if self._tokens is not None:
            self._tokens -= count
            if self._tokens < 0:
                raise Killed

    def finished(self, item, row):
        self._done += 1
        if self._done == self._answers:
            raise Killed
        if self._done == self._stop_after:
            self.stop.signal = 15


def outcome(rows):
    return {row["id"]: (row["token_ids"], row["finish_reason"], row["trace"]) for row in rows}


@pytest.fixture
def whole(job):
    """What an uninterrupted run writes."""
    job.run("output.trace=true", f"output.path={job.directory / 'whole.jsonl'}")
    output, job_output = job.directory / "whole.jsonl", job.output
    output.rename(job_output)
    rows = job.rows()
    job_output.unlink()
    return outcome(rows)


def snapshot(job):
    return job.directory / "out.jsonl.snapshot"


def die(job, **when):
    with pytest.raises(Killed):
        job.run(*EACH_STEP, console=Watch(**when))
    assert snapshot(job).is_dir()


def test_no_snapshots_are_taken_by_default(job):
    console = Watch(stop_after_answers=1)
    job.run(console=console, stop=console.stop)
    assert not snapshot(job).exists()


def test_a_stopped_job_decodes_no_token_twice(job, whole):
    console = Watch(stop_after_answers=2)
    job.run(*AT_THE_END, console=console, stop=console.stop)
    assert snapshot(job).is_dir() and len(job.rows()) < len(CASES)
    console = Watch()
    found = job.run(*AT_THE_END, console=console)
    assert "going on with" in console.said
    assert outcome(job.rows()) == whole and len(job.rows()) == len(CASES)
    assert sum(run["output_tokens"] for run in found["runs"]) == found["output_tokens"]
    assert not snapshot(job).exists()


@pytest.mark.parametrize("answers", [1, 2, 4])
def test_an_answer_written_after_the_snapshot_is_not_written_again(job, whole, answers):
    # The row is in the file, and the snapshot still has its request in flight.
    die(job, die_after_answers=answers)
    before = job.output.read_bytes()
    console = Watch()
    job.run(*EACH_STEP, console=console)
    assert "going on with" in console.said
    assert job.output.read_bytes().startswith(before)
    assert len(job.rows()) == len(CASES) and outcome(job.rows()) == whole
    assert not snapshot(job).exists()


def test_a_job_killed_before_its_first_answer_goes_on_all_the_same(job, whole):
    die(job, die_after_tokens=30)
    assert job.rows() == []
    console = Watch()
    found = job.run(*AT_THE_END, console=console)
    assert f"going on with {len(CASES)} requests from {snapshot(job)}" in console.said
    assert outcome(job.rows()) == whole
    assert 240 - 31 - 3 * 8 <= found["runs"][-1]["output_tokens"] < 240


def test_a_snapshot_made_under_other_settings_is_not_used(job):
    die(job, die_after_tokens=30)
    console = Watch()
    found = job.run(*AT_THE_END, "sampling.seed=1", console=console)
    assert f"the snapshot {snapshot(job)} is not used: it was made under other settings" in console.said
    assert found["runs"][-1]["output_tokens"] == 240
    assert not snapshot(job).exists()


@pytest.mark.parametrize("damaged", ["host.json", "state/manifest.ocdbt", "state/_METADATA"])
@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_a_damaged_snapshot_is_not_used_and_the_job_runs(job, whole, damaged, content):
    die(job, die_after_answers=1)
    file = snapshot(job) / "engine" / damaged
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    console = Watch()
    job.run(*AT_THE_END, console=console)
    assert "is not used: " in console.said and "is not a snapshot of an engine" in console.said
    assert outcome(job.rows()) == whole and len(job.rows()) == len(CASES)


def test_a_line_that_changed_meanwhile_is_answered_as_it_is_now(job):
    die(job, die_after_tokens=30)
    job.prompts(prompt(1, "case-0"), prompt(2), prompt(3, sampling={"max_tokens": 5}))
    job.run(*EACH_STEP)
    assert sorted(row["id"] for row in job.rows()) == ["case-0", "case-2", "case-3"]
    assert job.row("case-0")["token_ids"] == CASES[1]["greedy_tokens"]
    assert job.row("case-2")["token_ids"] == CASES[2]["greedy_tokens"]
    assert job.row("case-3")["token_ids"] == CASES[3]["greedy_tokens"][:5]


def test_overwrite_forgets_the_snapshot_too(job):
    die(job, die_after_tokens=30)
    console = Watch()
    found = job.run(*AT_THE_END, console=console, overwrite=True)
    assert "going on" not in console.said
    assert found["runs"][-1]["output_tokens"] == 240


def test_a_violated_invariant_is_not_restored(job):
    with pytest.raises(InvariantError):
        job.run(*EACH_STEP, load=Sabotaged.from_config)
    assert not snapshot(job).exists()


def test_the_snapshot_is_one_that_the_engine_can_be_restored_from(job, whole):
    die(job, die_after_tokens=30)
    engine = Engine.restore(snapshot(job) / "engine")
    done = {}
    while engine.has_work:
        done.update((u.id, u.completion) for u in engine.step() if u.completion is not None)
    assert {i: list(c.token_ids) for i, c in done.items()} == {i: tokens for i, (tokens, _, _) in whole.items()}
