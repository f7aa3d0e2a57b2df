"""A job as a process of its own, ended from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from tests.jobs.recall_job import CASES, prompt

COUNT = 60


def start(job):
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_jax", "generate", str(job.config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_after(job, answers, number):
    """Starts the job, ends it once it has written more answers, and returns exit code and stderr."""
    before = job.output.read_bytes().count(b"\n") if job.output.exists() else 0
    process = start(job)
    try:
        while not job.output.exists() or job.output.read_bytes().count(b"\n") < before + answers:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.002)
        process.send_signal(number)
        return process.communicate(timeout=60)[1], process.returncode
    finally:
        process.kill()


def test_a_job_killed_and_a_job_stopped_lose_nothing_and_repeat_nothing(job):
    job.prompts(*(prompt(n % len(CASES), n) for n in range(COUNT)))

    _, code = end_after(job, 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    with job.output.open("ab") as file:
        file.write(b'{"id": 59, "token_ids": [1, 2')
    written = job.output.read_bytes().rpartition(b"\n")[0]

    said, code = end_after(job, 3, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM; run the same command again for the rest" in said and "Traceback" not in said
    assert job.output.read_bytes().startswith(written)
    assert job.summary()["status"] == "stopped"
    written = job.output.read_bytes()
    assert len(written.splitlines()) < COUNT

    found = job.run()
    assert job.output.read_bytes().startswith(written)
    assert found["requests"]["total"] == COUNT
    rows = job.rows()
    assert sorted(row["id"] for row in rows) == list(range(COUNT))
    assert all(row["token_ids"] == CASES[row["id"] % len(CASES)]["greedy_tokens"] for row in rows)
