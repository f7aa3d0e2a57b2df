from __future__ import annotations

import pytest

from dflash_jax.engine import Engine
from dflash_jax.errors import CheckpointError, ConfigError, InvariantError
from dflash_jax.jobs import compare
from dflash_jax.jobs.console import JobConsole
from dflash_jax.signals import Stop
from tests.jobs.recall_job import CASES, GOLDEN, prompt

K = 7


def never(setup, clock):
    raise AssertionError("the models were loaded, though there was nothing to run")


def test_answers_and_drafts_equal_the_golden_record(job):
    job.run("output.trace=true")
    for index, case in enumerate(CASES):
        row = job.row(f"case-{index}")
        assert row["token_ids"] == case["greedy_tokens"]
        assert (row["finish_reason"], row["prompt_tokens"], row["text"]) == ("length", len(case["prompt"]), None)
        whole = next((n for n, b in enumerate(case["drafted_blocks"]) if len(b) < K), len(case["drafted_blocks"]))
        assert whole > 3
        assert row["trace"]["drafted_blocks"][:whole] == case["drafted_blocks"][:whole]
        assert row["trace"]["produced_per_round"][:whole] == case["produced_per_round"][:whole]


def test_a_row_has_the_fields_of_the_contract(job):
    job.prompts(prompt(0, 7))
    job.run()
    (row,) = job.rows()
    assert row["id"] == 7
    assert set(row) == {"id", "token_ids", "text", "finish_reason", "prompt_tokens", "metrics", "fallback", "positions"}
    metrics = row["metrics"]
    assert metrics["drafts_proposed"] == K * metrics["drafted_request_steps"] > 0
    assert metrics["accept_rate"] == pytest.approx(metrics["drafts_accepted"] / metrics["drafts_proposed"], abs=1e-6)
    steps = metrics["drafted_request_steps"]
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + metrics["drafts_accepted"] / steps, abs=1e-6)
    assert metrics["ttft_s"] > 0 and metrics["tpot_s"] > 0


def test_the_summary_adds_the_rows_up(job):
    found = job.run()
    rows = job.rows()
    assert job.summary() == found
    assert found["status"] == "finished"
    assert found["requests"] == {"total": 5, "stop": 0, "length": 5, "abort": 0, "error": 0}
    assert found["output_tokens"] == sum(len(row["token_ids"]) for row in rows) == 5 * 48
    assert found["prompt_tokens"] == sum(len(case["prompt"]) for case in CASES)
    accepted = sum(row["metrics"]["drafts_accepted"] for row in rows)
    steps = sum(row["metrics"]["drafted_request_steps"] for row in rows)
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps, abs=1e-6)
    (run,) = found["runs"]
    assert set(run["engine"]) > {"prefix_hits", "prefix_misses", "prefix_evictions", "prefix_tokens_saved"}
    assert (run["requests"], run["output_tokens"]) == (5, 240) and run["tokens_per_s"] > 0


def test_a_line_samples_in_its_own_way(job):
    job.prompts(
        prompt(0, "short", sampling={"max_tokens": 5}),
        prompt(0, "plain", sampling={"speculation": False}),
        prompt(0, "stops", sampling={"stop_token_ids": [CASES[0]["greedy_tokens"][3]]}),
        prompt(0, "as configured"),
    )
    job.run()
    greedy = CASES[0]["greedy_tokens"]
    assert job.row("short")["token_ids"] == greedy[:5]
    assert job.row("stops")["token_ids"] == greedy[:4] and job.row("stops")["finish_reason"] == "stop"
    assert job.row("plain")["token_ids"] == job.row("as configured")["token_ids"] == greedy
    assert job.row("plain")["metrics"]["drafts_proposed"] == 0
    assert job.row("plain")["fallback"] == "the request asked for no speculation"
    assert job.row("as configured")["fallback"] is None
    assert job.summary()["fallbacks"] == 1


def test_without_a_draft_the_job_decodes_plainly(job):
    job.prompts(prompt(1))
    found = job.run("draft=null", "sampling.max_tokens=8")
    assert job.row("case-1")["token_ids"] == CASES[1]["greedy_tokens"][:8]
    assert found["accept_rate"] is None and found["drafts_proposed"] == 0


def test_bad_lines_become_error_rows_and_the_rest_runs(job):
    job.prompts(
        b"not json",
        {"id": "none"},
        {"id": "both", "prompt": "x", "prompt_token_ids": [1]},
        {"id": "empty", "prompt_token_ids": []},
        {"id": "long", "prompt_token_ids": [1] * 160},
        prompt(0, "key", sampling={"temprature": 1}),
        {"id": "outside", "prompt_token_ids": [1, 64]},
        {"id": "huge", "prompt_token_ids": [10**30]},
        {"id": "text", "prompt": "no tokenizer for it"},
        prompt(0, "twice"),
        prompt(1, "twice"),
        b'{"prompt": "\xff"}',
        prompt(1, "good"),
    )
    found = job.run("output.trace=true")
    assert job.row("good")["token_ids"] == CASES[1]["greedy_tokens"]
    assert job.row("twice")["token_ids"] == CASES[0]["greedy_tokens"]
    says = {
        "line-1": (1, "not JSON"),
        "none": (2, "has no prompt"),
        "both": (3, "has prompt and prompt_token_ids"),
        "empty": (4, "is empty"),
        "long": (5, "the prompt has 160 tokens"),
        "key": (6, "unknown sampling key 'temprature'; the nearest known one is 'temperature'"),
        "outside": (7, "64 is outside the vocabulary of 64"),
        "huge": (8, "outside the vocabulary"),
        "text": (9, "no tokenizer"),
        "line-11": (11, "is already that of line 10"),
        "line-12": (12, "not UTF-8"),
    }
    assert len(job.rows()) == len(says) + 2
    for item_id, (line, message) in says.items():
        row = job.row(item_id)
        assert (row["finish_reason"], row["line"], row["token_ids"]) == ("error", line, [])
        assert row["error"].startswith(f"line {line}: ") and message in row["error"]
        assert set(row) == {*job.row("good"), "line", "error"}
        assert set(row["metrics"]) == set(job.row("good")["metrics"])
    assert found["requests"]["error"] == len(says)


def test_an_empty_input_is_a_finished_job(job):
    job.prompts()
    assert job.run(load=never)["requests"]["total"] == 0


def test_a_rerun_of_a_finished_job_runs_nothing(job):
    job.prompts(b"not json", prompt(0))
    first = job.run()
    before = job.output.read_bytes()
    again = job.run(load=never)
    assert job.output.read_bytes() == before
    assert again == first


class StopAfter(JobConsole):
    """Asks a job to end after some answers."""

    def __init__(self, answers):
        super().__init__(quiet=True)
        self.stop, self._left = Stop(), answers

    def finished(self, item, row):
        self._left -= 1
        if self._left == 0:
            self.stop.signal = 15


def test_an_interrupted_job_goes_on_where_it_was(job):
    console = StopAfter(2)
    found = job.run(console=console, stop=console.stop)
    before = job.output.read_bytes()
    assert found["status"] == "stopped"
    assert 2 <= len(job.rows()) < 5
    job.output.write_bytes(before + b'{"id": "case-4", "token_i')
    found = job.run()
    assert job.output.read_bytes().startswith(before)
    assert sorted(row["id"] for row in job.rows()) == [f"case-{index}" for index in range(5)]
    assert all(job.row(f"case-{index}")["token_ids"] == case["greedy_tokens"] for index, case in enumerate(CASES))
    assert sum(run["requests"] for run in found["runs"]) == 5 and len(found["runs"]) == 2


def test_a_mended_line_is_run_and_replaces_its_error_row(job):
    bad = {"id": "long", "prompt_token_ids": [1] * 500}
    job.prompts(prompt(0), b"not json", bad)
    job.run()
    answered = job.row("case-0")
    job.prompts(prompt(0), prompt(1, "mended"), prompt(2, "long"))
    job.run()
    assert job.row("case-0") == answered
    assert sorted(row["id"] for row in job.rows()) == ["case-0", "long", "mended"]
    assert job.row("mended")["token_ids"] == CASES[1]["greedy_tokens"]
    assert job.row("long")["token_ids"] == CASES[2]["greedy_tokens"]


@pytest.mark.parametrize(
    "override", ["sampling.temperature=0.5", "draft=null", "draft.k=3", "engine.max_model_len=100"]
)
def test_other_settings_are_not_mixed_into_an_output(job, override):
    job.prompts(prompt(0))
    job.run()
    before = job.output.read_bytes()
    with pytest.raises(ConfigError, match=r"out.jsonl was made with .* --overwrite"):
        job.run(override, load=never)
    assert job.output.read_bytes() == before


def test_settings_that_do_not_shape_answers_may_change(job):
    job.prompts(prompt(0))
    job.run()
    job.run("engine.prefill_chunk=64", "output.trace=true", load=never)


def test_overwrite_starts_anew_once_the_models_are_there(job):
    job.prompts(prompt(0))
    job.run()
    before = job.output.read_bytes()
    with pytest.raises(CheckpointError):
        job.run("target.path=absent", overwrite=True)
    assert job.output.read_bytes() == before
    job.run("sampling.max_tokens=3", overwrite=True)
    assert job.row("case-0")["token_ids"] == CASES[0]["greedy_tokens"][:3]


def test_input_and_output_must_differ(job):
    before = (job.directory / "in.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="are the same file"):
        job.run(f"output.path={job.directory}/./in.jsonl", load=never)
    assert (job.directory / "in.jsonl").read_bytes() == before


class Sabotaged(Engine):
    """An engine in which request case-1 loses the end of its draft context while it decodes."""

    def step(self):
        for sequence in self.host.running:
            if sequence.id == "case-1" and len(sequence.output) > 8:
                slots = self.state.slots
                self.state = self.state.replace(
                    slots=slots.replace(draft_len=slots.draft_len.at[sequence.slot].add(-1))
                )
        return super().step()


def test_a_request_that_fails_in_the_engine_is_an_error_row_and_stays_one(job):
    job.run("engine.strict=false", load=Sabotaged.from_config)
    row = job.row("case-1")
    assert row["finish_reason"] == "error" and "line" not in row
    assert row["error"].startswith("context_continuity is violated")
    assert all(job.row(f"case-{i}")["token_ids"] == CASES[i]["greedy_tokens"] for i in (0, 2, 3, 4))
    job.run("engine.strict=false", load=never)


def test_a_strict_engine_ends_the_job_and_the_rows_stay(job):
    with pytest.raises(InvariantError, match=r"^context_continuity is violated"):
        job.run(load=Sabotaged.from_config)
    assert job.summary()["status"] == "failed"
    before = job.output.read_bytes()
    job.run()
    assert job.output.read_bytes().startswith(before) and len(job.rows()) == 5


def test_the_comparison_with_plain_decoding_is_in_the_summary(job):
    found = job.run("report.compare_plain=true", "report.compare_requests=2")["compare_plain"]
    assert found["requests"] == found["greedy_requests"] == found["greedy_equal"] == 2
    assert 1 <= found["pairs"] <= 4 and found["speedup_min"] <= found["speedup"] <= found["speedup_max"]
    assert found["speedup"] == pytest.approx(found["drafted_tokens_per_s"] / found["plain_tokens_per_s"], rel=1e-3)
    assert found["mean_acceptance_length"] > 2
    assert job.run(load=never)["compare_plain"] == found


def test_drafting_that_changes_greedy_tokens_is_an_error():
    unequal = {"greedy_equal": 1, "greedy_requests": 2}
    with pytest.raises(Exception, match="1 of 2 greedy requests got other tokens"):
        compare.check_lossless(unequal, "float32")
    compare.check_lossless(unequal, "bfloat16")


def test_a_missing_checkpoint_writes_no_answer(job):
    job.configure(target={"path": str(GOLDEN / "absent")})
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        job.run()
    assert job.output.read_bytes() == b""
