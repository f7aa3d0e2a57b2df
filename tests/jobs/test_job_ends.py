"""How a job ends: what its summary says and where it is, and what an output may be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from dflash_jax.engine import Engine, SamplingParams
from dflash_jax.errors import ConfigError, DflashError
from dflash_jax.jobs.console import JobConsole
from dflash_jax.jobs.reader import Item
from dflash_jax.jobs.summary import summary_path
from dflash_jax.jobs.writer import ResultFile
from tests.jobs.recall_job import CASES, prompt

NAMES = ["out.jsonl", "t-0.7", "t-0.8", "t", "t.jsonl", "t.json", ".hidden", "a.b.c"]


def test_no_two_outputs_of_a_folder_share_a_side_file():
    from dflash_jax.jobs.checkpoint import snapshot_path

    for path in (summary_path, snapshot_path):
        assert len({path(f"o/{name}") for name in NAMES}) == len(NAMES)


def test_two_outputs_that_differ_behind_a_dot_are_two_jobs(job):
    job.prompts(prompt(0))
    for temperature in ("0.7", "0.8", "0.7"):
        job.run(f"output.path={job.directory}/t-{temperature}", f"sampling.temperature={temperature}")
    for temperature in (0.7, 0.8):
        found = json.loads((job.directory / f"t-{temperature}.summary.json").read_text())
        assert found["settings"]["sampling.temperature"] == temperature and found["status"] == "finished"


# Crashes.


class Crashing(Engine):
    """An engine that breaks after some steps, in the way it is told to."""

    error: BaseException = ZeroDivisionError("division by zero")
    steps = 3

    def step(self):
        self.steps -= 1
        if self.steps < 0:
            raise self.error
        return super().step()


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ZeroDivisionError("division by zero"), "failed", "ZeroDivisionError: division by zero"),
        (DflashError("the sentence"), "failed", "the sentence"),
        (OverflowError("x" * 5_000_000), "failed", "OverflowError: xxx"),
        (KeyboardInterrupt(), "stopped", "interrupted from the keyboard"),
        (SystemError(), "failed", "SystemError: "),
        (type("PanicException", (BaseException,), {})("a panic in Rust"), "failed", "PanicException: a panic in Rust"),
        (SystemExit("a library gave up"), "failed", "SystemExit: a library gave up"),
    ],
    ids=["bug", "sentence", "endless", "keyboard", "silent", "panic", "exit"],
)
def test_a_job_that_crashes_says_so_in_its_summary(job, error, status, reason):
    with pytest.raises(type(error)):
        job.run(load=type("Broken", (Crashing,), {"error": error}).from_config)
    found = job.summary()
    assert found["status"] == status and found["reason"].startswith(reason) and len(found["reason"]) < 3000
    job.run()
    assert (job.summary()["status"], job.summary()["reason"]) == ("finished", None)
    assert len(job.rows()) == len(CASES)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")])
def test_too_little_memory_is_one_sentence(job, error):
    with pytest.raises(DflashError, match=r"not enough memory for this job; give it a smaller engine\.num_pages"):
        job.run(load=type("Broken", (Crashing,), {"error": error}).from_config)
    assert job.summary()["reason"].startswith("there is not enough memory")


def test_a_crash_while_the_models_load_is_a_failed_job(job):
    def broken(setup, clock):
        raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        job.run(load=broken)
    assert job.summary()["status"] == "failed"


def test_sizes_that_no_machine_has_are_refused_before_anything_is_made(job):
    with pytest.raises(ConfigError, match=r"need 98,304\.0 GiB, and the device has"):
        job.run("engine.num_pages=2147483647")
    for override in ("max_slots=9223372036854775808", "page_size=9223372036854775808", f"prefill_chunk={10**300}"):
        with pytest.raises(ConfigError, match="should be less than or equal to"):
            job.run(f"engine.{override}")


# Speeds.


def test_compilation_is_in_a_row_of_its_own_and_in_no_other_figure(job, monkeypatch):
    """Each program here takes a second longer to trace than it does."""
    import time

    import jax

    class Slow(Engine):
        slept = 0.0

        def step(self):
            # Traced anew in every step, as a program of a new size would be.
            @jax.jit
            def traced_slowly(x):
                time.sleep(0.2)
                return x

            traced_slowly(1.0)
            Slow.slept += 0.2
            return super().step()

    begin = time.perf_counter()
    found = job.run(load=Slow.from_config)
    wall = time.perf_counter() - begin
    [run] = found["runs"]
    assert run["compilation"]["seconds"] >= Slow.slept > 1
    assert run["seconds"] + run["compilation"]["seconds"] <= wall
    assert run["tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"], rel=1e-2)
    assert found["ttft_s"]["mean"] + 47 * found["tpot_s"]["mean"] < wall - Slow.slept


def test_the_outcome_shows_compilation_and_the_spread_of_the_speed_up(job, capsys):
    job.prompts(prompt(0), prompt(1))
    console = JobConsole(quiet=True)
    found = job.run("report.compare_plain=true", "report.compare_tokens=8", console=console)
    console.outcome(found)
    said = capsys.readouterr().out
    for word in ("compilation", "in no other figure", "out of the cache", " to "):
        assert word in said
    assert re.search("in ([2-4] pairs|1 pair) ", said)
    assert "compilation included" not in said


def test_prompts_and_answers_are_shown_as_they_are(job, capsys):
    found = job.run()
    console = JobConsole(samples=1)
    item = Item(1, "a", "is [/b] :heart: [red]", SamplingParams())
    console.finished(item, job.rows()[0] | {"text": "no, [/i] :smile:\n\tis\x1b[2J \\"})
    console.refused({"error": "[/u] \x1b[2J"})
    console.outcome(found)
    said = capsys.readouterr().out
    for text in ("is [/b] :heart: [red]\n", "no, [/i] :smile:\n\tis\\x1b[2J \\\n", "error: [/u] \\x1b[2J\n"):
        assert text.expandtabs() in said.expandtabs()


# Outputs.


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero", "/dev/null", "/dev/stdout"])
def test_a_device_is_no_output_and_is_not_read(job, device):
    command = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32)); "
        f"from dflash_jax.jobs.writer import ResultFile; ResultFile({device!r})"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    assert "is no file but a device or a pipe; give it a file" in done.stderr.splitlines()[-1]


def test_a_pipe_is_no_output(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file but a device or a pipe"):
        ResultFile(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\udcff\ud800"], ids=["NUL", "long", "surrogate"])
def test_a_path_that_no_file_can_have_is_no_output(tmp_path, path):
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        ResultFile(tmp_path / path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "line",
    [
        {"id": "a", "finish_reason": "stop", "metrics": [1]},
        {"id": "a", "finish_reason": "stop", "metrics": {"ttft_s": "x"}},
        {"id": "a", "finish_reason": "stop", "token_ids": 3},
        {"id": ["a"], "finish_reason": "stop"},
        {"id": "a", "finish_reason": None},
    ],
    ids=range(5),
)
def test_a_line_that_only_looks_like_a_result_is_none(tmp_path, line):
    (tmp_path / "out.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="line 1 is not a result that a job wrote"):
        ResultFile(tmp_path / "out.jsonl")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_dry_run_looks_at_the_file_that_the_job_would_read(job, role):
    from dflash_jax.jobs.config import load_job
    from dflash_jax.jobs.dry_run import dry_run

    with pytest.raises(DflashError, match=r"there is no file 'x\.gguf' in "):
        dry_run(load_job(job.config, [f"{role}.file=x.gguf"]))
