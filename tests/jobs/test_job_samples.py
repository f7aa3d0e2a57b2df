"""Several samples and log-probabilities in a job: a row has all of a line's, however often the job is killed."""

from __future__ import annotations

import json
import math

import pytest

from dflash_jax.engine import SamplingParams, TokenLogprob, TopLogprob
from dflash_jax.jobs.reader import BadLine, read_items
from dflash_jax.jobs.results import _logprob
from tests.full_forward import full_logprobs
from tests.jobs.recall_job import CASES, GOLDEN, prompt
from tests.jobs.test_job_resumed import EACH_STEP, Killed, Watch
from tests.pairs import alone

HOT = {"temperature": 4.0, "max_tokens": 20, "ignore_eos": True, "seed": 7}


def outcome(rows):
    return {row["id"]: [sample["token_ids"] for sample in row.get("samples", [row])] for row in rows}


def sampled(job):
    job.configure(sampling={**HOT, "n": 3})
    job.prompts(*(prompt(index) for index in range(len(CASES))), prompt(0, "one", sampling={"n": 1}))


def test_a_row_has_all_samples_and_the_summary_counts_them(job):
    sampled(job)
    found = job.run()
    assert [row["id"] for row in job.rows() if "samples" not in row] == ["one"]
    for index, case in enumerate(CASES):
        row = job.row(f"case-{index}")
        assert len(row["samples"]) == 3 and row["token_ids"] == row["samples"][0]["token_ids"]
        for number, sample in enumerate(row["samples"]):
            own = tuple({**HOT, "seed": 7 + number}.items())
            assert tuple(sample["token_ids"]) == alone("recall-dflash2", tuple(case["prompt"]), own).token_ids
            assert "id" not in sample and sample["finish_reason"] == "length"
    assert found["requests"]["total"] == 3 * len(CASES) + 1
    assert found["output_tokens"] == 20 * (3 * len(CASES) + 1)


@pytest.mark.parametrize("tokens", [15, 60, 130, 200])
def test_a_killed_job_loses_and_doubles_no_sample(job, tokens):
    sampled(job)
    job.run(f"output.path={job.directory / 'whole.jsonl'}")
    whole = outcome(map(json.loads, (job.directory / "whole.jsonl").read_bytes().splitlines()))
    with pytest.raises(Killed):
        job.run(*EACH_STEP, console=Watch(die_after_tokens=tokens))
    before = job.output.read_bytes()
    job.run(*EACH_STEP, console=Watch())
    assert job.output.read_bytes().startswith(before)
    assert outcome(job.rows()) == whole and len(job.rows()) == len(CASES) + 1


def test_ids_of_samples_belong_to_their_line(tmp_path):
    hot = SamplingParams(temperature=1.0)
    lines = [
        {"id": "a", "prompt": "x", "sampling": {"n": 2}},
        {"id": "a#1", "prompt": "x"},
        {"id": "a#2", "prompt": "x"},
        {"id": "b#1", "prompt": "x"},
        {"id": "b", "prompt": "x", "sampling": {"n": 2}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    items = list(read_items(tmp_path / "in.jsonl", hot))
    assert [isinstance(item, BadLine) for item in items] == [False, True, False, False, True]
    assert items[1].error == "the id 'a#1' is already that of line 1; ids must be unique"
    assert items[4].error == "the id 'b#1' of one of its samples is already that of line 4; ids must be unique"


def test_rows_have_the_logprobs_that_were_asked_for_and_no_others(job):
    job.prompts(prompt(1, "none"), prompt(1, "some", sampling={"logprobs": 2, "prompt_logprobs": 0}), prompt(1, "0"))
    job.run("sampling.max_tokens=9", "sampling.ignore_eos=true")
    assert not {"logprobs", "prompt_logprobs"} & {*job.row("none"), *job.row("0")}
    row, case = job.row("some"), CASES[1]
    truth = full_logprobs(GOLDEN / "recall-target", [*case["prompt"], *row["token_ids"]])
    assert [one["token_id"] for one in row["logprobs"]] == row["token_ids"] == job.row("none")["token_ids"]
    for one, values in zip(row["logprobs"], truth[len(case["prompt"]) - 1 :], strict=False):
        assert set(one) == {"token_id", "text", "logprob", "rank", "top"} and len(one["top"]) == 2
        assert abs(one["logprob"] - values[one["token_id"]]) < 1e-4
        assert all(abs(top["logprob"] - values[top["token_id"]]) < 1e-4 for top in one["top"])
    assert row["prompt_logprobs"][0] is None
    assert [one["token_id"] for one in row["prompt_logprobs"][1:]] == case["prompt"][1:]
    assert all(one["top"] == [] for one in row["prompt_logprobs"][1:])


def test_a_token_without_any_chance_has_null_and_small_numbers_keep_their_digits():
    record = TokenLogprob(3, None, -math.inf, 7, (TopLogprob(1, "a", -1.2345678e-7),))
    assert _logprob(record) == {
        "token_id": 3,
        "text": None,
        "logprob": None,
        "rank": 7,
        "top": [{"token_id": 1, "text": "a", "logprob": -1.234568e-07}],
    }


@pytest.mark.slow
def test_a_job_that_asks_for_logprobs_compiles_nothing_after_its_first_request(job, monkeypatch):
    from dflash_jax.programs import Program

    made = []
    get = Program._get

    def watched(self, args, static):
        found = get(self, args, static)
        made.append((self.name, found[1]))
        return found

    job.run("sampling.logprobs=2", "sampling.prompt_logprobs=1", "sampling.max_tokens=12")
    job.output.unlink()
    (job.directory / "out.jsonl.summary.json").unlink()
    monkeypatch.setattr(Program, "_get", watched)
    from dflash_jax.programs import clear_programs

    clear_programs()
    begun = []
    console = Watch()
    monkeypatch.setattr(console, "prepared", lambda *_: begun.append(len(made)), raising=False)
    job.run("sampling.logprobs=2", "sampling.prompt_logprobs=1", "sampling.max_tokens=12", console=console)
    [before] = begun
    assert made[before:] and all(source == "memory" for _, source in made[before:])
