"""Parquet as output: files that are closed as their rows come, and nothing lost or doubled by a kill."""

from __future__ import annotations

import os
import random
import signal
import time

import pyarrow.parquet
import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.jobs.formats import parquet_output, read_output
from dflash_jax.jobs.formats.parquet_output import ROWS, ParquetResults, parts
from dflash_jax.jobs.results import refusal
from tests.jobs.recall_job import CASES, prompt
from tests.jobs.test_job_interrupted import start

METRICS = {
    "drafts_proposed": 3,
    "drafts_accepted": 1,
    "drafted_request_steps": 1,
    "accept_rate": 0.3,
    "mean_acceptance_length": None,
    "ttft_s": 0.25,
    "tpot_s": None,
    "preemptions": 0,
    "cached_tokens": 2,
    "damaged_drafts": 0,
}


def answer(item_id, **more):
    return {
        "id": str(item_id),
        "text": None,
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "metrics": METRICS,
        "fallback": None,
        **more,
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.parquet"


def open_(path):
    return ParquetResults(path, row_group=3)


def ids(path):
    return sorted(row["id"] for row in read_output(path))


def test_a_file_is_closed_when_its_rows_are_enough_and_the_rest_at_the_end(path):
    with open_(path) as results:
        for n in range(7):
            results.write(answer(n))
        assert [pyarrow.parquet.read_metadata(part).num_rows for part in parts(path)] == [3, 3]
        assert ids(path) == list("0123456")
    assert [pyarrow.parquet.read_metadata(part).num_rows for part in parts(path)] == [3, 3, 1]
    assert pyarrow.parquet.read_table(path).column("id").to_pylist() == list("0123456")
    assert sorted(os.listdir(path)) == [part.name for part in parts(path)]


def test_every_result_is_read_back_as_it_was_written(path):
    rows = [
        answer("a", text="é\u2028"),
        answer("b", trace={"produced_per_round": [1, 2]}, finish_reason="error", error="it broke"),
        answer("c", metrics={**METRICS, "new": 5}),
        {**refusal("d", 4, "no prompt", trace=False)},
    ]
    with open_(path) as results:
        for row in rows:
            results.write(row)
    assert list(read_output(path)) == rows


def test_a_reopened_output_knows_what_is_done_and_goes_on(path):
    with open_(path) as results:
        for n in range(4):
            results.write(answer(n))
    with open_(path) as results:
        assert results.answers == 4 and results.has("3") and results.has(3) and not results.has("4")
        results.write(answer(4))
    assert ids(path) == list("01234")


def test_a_kill_between_a_files_end_and_the_forgetting_of_its_rows_doubles_nothing(path, monkeypatch):
    results = open_(path)
    monkeypatch.setattr(results._waiting, "clear", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    results.write(answer(0))
    results.write(refusal("r", 1, "no prompt", trace=False))
    with pytest.raises(KeyboardInterrupt):
        results.write(answer(1))
    results._waiting.close()
    assert len(parts(path)) == 1 and (path / ROWS).stat().st_size
    assert ids(path) == ["0", "1", "r"]
    with open_(path) as results:
        assert sorted(row["id"] for row in results.results()) == ["0", "1", "r"]
    assert ids(path) == ["0", "1", "r"] and len(parts(path)) == 1


def test_refusals_that_no_longer_hold_are_removed_and_answers_stay(path):
    with open_(path) as results:
        for n in range(3):
            results.write(refusal(f"r{n}", n + 1, "no prompt", trace=False))
        results.write(answer("a"))
        results.keep_refusals({"r1"})
        assert sorted(row["id"] for row in results.results()) == ["a", "r1"]
        results.write(answer("r0"))
        results.write(refusal("r1", 2, "no prompt", trace=False))
    assert ids(path) == ["a", "r0", "r1"]


def test_a_second_job_is_kept_out(path):
    with open_(path), pytest.raises(ConfigError, match="another job is writing"):
        open_(path)


def test_what_is_no_output_of_a_job_is_left_alone(path):
    path.write_text("hello")
    with pytest.raises(ConfigError, match="is a file, and Parquet output is a directory"):
        open_(path)
    path.unlink()
    path.mkdir()
    table = pyarrow.table({"id": ["a"]})
    pyarrow.parquet.write_table(table, path / "part-000000.parquet")
    with pytest.raises(ConfigError, match=r"part-000000.parquet is not a file of results of this version"):
        open_(path)
    (path / "part-000000.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ConfigError, match=r"part-000000.parquet cannot be read .* answers in it are made again"):
        open_(path)


def test_a_full_disk_is_one_sentence_and_what_was_written_stays(path, monkeypatch):
    with pytest.raises(ConfigError, match=r"cannot be written .No space left"), open_(path) as results:

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pyarrow.parquet, "write_table", full)
        for n in range(3):
            results.write(answer(n))
    monkeypatch.undo()
    with open_(path) as results:
        assert results.answers == 3
    assert ids(path) == list("012")


def test_long_rows_close_a_file_before_there_are_many(path, monkeypatch):
    monkeypatch.setattr(parquet_output, "_MOST_BYTES", 1000)
    with ParquetResults(path, row_group=10_000) as results:
        for n in range(10):
            results.write(answer(n, text="x" * 300))
    assert len(parts(path)) > 3


def test_an_output_without_rows_can_be_read(path):
    with open_(path):
        pass
    assert pyarrow.parquet.read_table(path).num_rows == 0


def test_a_job_writes_the_rows_that_it_writes_as_json(job):
    job.run("output.trace=true")
    job.run("output.trace=true", f"output.path={job.directory / 'out.parquet'}")

    def comparable(rows):
        return {
            row["id"]: {k: v for k, v in row.items() if k != "metrics"} | {"n": row["metrics"]["drafts_accepted"]}
            for row in rows
        }

    assert comparable(read_output(job.directory / "out.parquet")) == comparable(job.rows())


COUNT = 60
KILLS = int(os.environ.get("DFLASH_JAX_KILLS", "3"))


def test_a_parquet_job_killed_again_and_again_loses_and_doubles_nothing(job):
    output = job.directory / "out.parquet"
    job.prompts(*(prompt(n % len(CASES), f"p{n}") for n in range(COUNT)))
    job.run()
    whole = {row["id"]: row["token_ids"] for row in job.rows()}
    job.configure(output={"path": str(output), "row_group": 4})

    rng = random.Random(int(os.environ.get("DFLASH_JAX_KILL_SEED", "0")))
    killed, written = 0, set()
    for _ in range(KILLS):
        process = start(job)
        try:
            while process.poll() is None and len(list(read_output(output))) <= len(written):
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            said = process.communicate(timeout=60)[1]
            killed += process.returncode == -signal.SIGKILL
        finally:
            process.kill()
        now = ids(output)
        assert len(now) == len(set(now)) and written <= set(now), said
        written = set(now)
    assert killed == KILLS, f"the job ended before it could be killed for the {killed + 1}th time"
    assert len(written) < COUNT

    job.run()
    rows = list(read_output(output))
    assert {row["id"]: row["token_ids"] for row in rows} == whole and len(rows) == COUNT
    before = {part.name: part.read_bytes() for part in parts(output)}
    assert job.run()["requests"]["total"] == COUNT
    assert {part.name: part.read_bytes() for part in parts(output)} == before
