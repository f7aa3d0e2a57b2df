"""A sweep on a recall pair."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from dflash_jax.bench import sweep
from dflash_jax.bench.config import load_sweep, parse_levels
from dflash_jax.bench.prompts import make_prompts
from dflash_jax.bench.sweep import Load, failures, run_sweep
from dflash_jax.engine import Engine
from dflash_jax.errors import ConfigError
from tests.jobs.recall_job import CASES, Job, prompt
from tests.pairs import engine

LOAD = Load(prompt_tokens=40, output_tokens=24)


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    made.configure()
    made.prompts(*(prompt(index) for index in range(len(CASES))))
    return made


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("sweep"))
    job.configure()
    job.prompts(*(prompt(index) for index in range(len(CASES))))
    command = [sys.executable, "-m", "dflash_jax.cli", "bench", "ladder", str(job.config), "--concurrency", "1,3"]
    command += ["--prompt-tokens", "40", "--output-tokens", "24", "--out", str(job.directory / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, job.directory / "out"


def test_every_level_completes_all_requests_and_drafts_alike(swept):
    found = json.loads((swept[1] / "sweep.json").read_text())
    assert (found["k"], found["output_tokens"], found["prompts"]["tokens"]) == (7, 24, 40)
    assert [level["concurrency"] for level in found["levels"]] == [1, 3]
    alone = found["levels"][0]["on"]
    assert alone["mean_acceptance_length"] > 3
    for level in found["levels"]:
        # Each of the five prompts equally often, and at least two for each slot.
        assert level["requests"] == {1: 5, 3: 10}[level["concurrency"]]
        for way in ("on", "off"):
            # Counted in all runs: one to compile and three to time.
            assert (level[way]["completed"], level[way]["failed"]) == (4 * level["requests"], 0)
            assert level[way]["output_tokens_per_s"] == pytest.approx(24 * level["requests"] / level[way]["seconds"])
            for name in ("tpot_s", "ttft_s"):
                assert level[way][name]["mean"] > 0 and level[way][name]["median"] > 0
        assert level["same_tokens"] == level["requests"]
        assert level["ratio"] == pytest.approx(level["on"]["output_tokens_per_s"] / level["off"]["output_tokens_per_s"])
        for name in ("accept_rate", "mean_acceptance_length"):
            assert level["on"][name] == pytest.approx(alone[name], rel=0.01)
            assert level["off"][name] is None


def test_the_table_says_where_the_prompts_are_from_and_the_plot_is_there(swept):
    out, directory = swept
    lengths = [len(case["prompt"]) for case in CASES]
    cut, short = sum(n > 40 for n in lengths), sum(n < 40 for n in lengths)
    assert "the first 5 of" in out and f"{cut} cut and {short} continued by the target to 40 tokens" in out
    assert "ratio" in out and "sweep.png" in out
    assert (directory / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_of_the_input_follow_its_text(job):
    found = make_prompts(engine("recall-dflash2"), engine(None), load_sweep(job.config), 30, seed=0)
    assert [len(tokens) for tokens in found.token_ids] == [30] * 5
    for tokens, case in zip(found.token_ids, CASES, strict=True):
        assert list(tokens) == (case["prompt"] + case["greedy_tokens"])[:30]


def test_random_prompts_have_no_special_tokens_and_a_fixed_seed(job):
    config, loaded = load_sweep(job.config, ["input=null"]), engine("recall-dflash2")
    found = make_prompts(loaded, loaded, config, 200, seed=3)
    assert found.source == "200 random tokens each, seed 3"
    assert found == make_prompts(loaded, loaded, config, 200, seed=3)
    assert found.token_ids != make_prompts(loaded, loaded, config, 200, seed=4).token_ids
    assert {len(tokens) for tokens in found.token_ids} == {200} and len(set(found.token_ids)) == 8
    used = {token for tokens in found.token_ids for token in tokens}
    # BOS, EOS and the mask; every other token comes up among 1,600.
    assert used == set(range(64)) - {60, 62, 63}


def test_a_request_that_fails_is_counted_and_fails_the_command(job, monkeypatch):
    class Sabotaged(Engine):
        def step(self):
            for sequence in self.host.running if self.k else ():
                if sequence.id == "1" and len(sequence.output) > 4:
                    slots = self.state.slots
                    lost = slots.draft_len.at[sequence.slot].add(-1)
                    self.state = self.state.replace(slots=slots.replace(draft_len=lost))
            return super().step()

    monkeypatch.setattr(sweep, "Engine", Sabotaged)
    found = run_sweep(load_sweep(job.config), [1], dataclasses.replace(LOAD, repeats=1))
    assert failures(found) == found["levels"][0]["on"]["failed"] == 2
    assert (found["levels"][0]["on"]["completed"], found["levels"][0]["off"]["completed"]) == (8, 10)
    assert found["levels"][0]["on"]["errors"][0].startswith("context_continuity is violated")

    from dflash_jax import cli

    monkeypatch.setattr(sys, "argv", ["dflash-jax", "bench", "ladder", str(job.config), "--concurrency", "1"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--prompt-tokens", "40", "--out", str(job.directory)])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--output-tokens", "24"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1


@pytest.mark.parametrize("text", ["", "1,,2", "0,1", "a", "-1"])
def test_levels_must_be_positive_integers(text):
    with pytest.raises(ConfigError, match="must be positive integers such as"):
        parse_levels(text)


def test_what_cannot_be_measured_is_refused(job):
    with pytest.raises(ConfigError, match=r"need 168, but engine\.max_model_len is 160"):
        run_sweep(load_sweep(job.config), [1], Load(prompt_tokens=104, output_tokens=64))
    with pytest.raises(ConfigError, match="there is no 'draft'"):
        load_sweep(job.config, ["draft=null"])
    with pytest.raises(ConfigError, match=r"the nearest known one is 'engine\.max_slots'"):
        load_sweep(job.config, ["engine.max_slot=3"])
    job.prompts(b"not json", {"id": 1, "prompt": "there is no tokenizer for it"})
    with pytest.raises(ConfigError, match="has no prompt that can be run"):
        run_sweep(load_sweep(job.config), [1], LOAD)


def test_each_level_is_handed_over_when_it_is_done(job):
    seen = []
    found = run_sweep(load_sweep(job.config), [1, 2], dataclasses.replace(LOAD, repeats=1), on_level=seen.append)
    assert [[level["concurrency"] for level in each["levels"]] for each in seen] == [[1], [1, 2]]
    assert [each["status"] for each in seen] == ["running", "running"] and found["status"] == "finished"
    assert found["levels"] == seen[-1]["levels"]


def test_a_sweep_that_is_ended_leaves_the_levels_it_has_done(job, monkeypatch):
    def ended(config, loaded, slots, *rest):
        if slots == 2:
            raise KeyboardInterrupt
        return level(config, loaded, slots, *rest)

    from dflash_jax import cli

    level = sweep._level
    monkeypatch.setattr(sweep, "_level", ended)
    out = job.directory / "out"
    command = ["dflash-jax", "bench", "ladder", str(job.config), "--concurrency", "1,2", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--prompt-tokens", "40", "--output-tokens", "24", "--out", str(out)])
    with pytest.raises(SystemExit):
        cli.main()
    found = json.loads((out / "sweep.json").read_text())
    assert found["status"] == "running" and [level["concurrency"] for level in found["levels"]] == [1]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
