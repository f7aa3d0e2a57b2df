"""A job with snapshots as a process of its own, killed at random points.

Environment:
  DFLASH_JAX_KILLS: how often to kill it, 3 unless set.
  DFLASH_JAX_KILL_SEED: of the points.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.jobs.recall_job import CASES, GOLDEN, prompt
from tests.jobs.test_job_interrupted import start
from tests.jobs.test_job_resumed import outcome, snapshot

COUNT = 40
KILLS = int(os.environ.get("DFLASH_JAX_KILLS", "3"))
SEED = int(os.environ.get("DFLASH_JAX_KILL_SEED", "0"))


def stamp(path):
    return path.stat().st_mtime_ns if path.exists() else None


def kill_at(job, seconds):
    """Starts the job and kills it so long after its first snapshot; returns what it said, and whether it was alive."""
    job_file = snapshot(job) / "engine"
    before = stamp(job_file)
    process = start(job)
    try:
        while stamp(job_file) == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
        return said, process.returncode == -signal.SIGKILL
    finally:
        process.kill()


@pytest.mark.parametrize("pair", ["recall-dflash2", "recall-hybrid-dflash2"])
def test_a_job_killed_again_and_again_ends_as_if_it_never_was(job, pair):
    target = "recall-hybrid-target" if "hybrid" in pair else "recall-target"
    models = {"target": {"path": str(GOLDEN / target)}, "draft": {"path": str(GOLDEN / pair), "width": 7}}
    job.configure(**models)
    job.prompts(*(prompt(n % len(CASES), n) for n in range(COUNT)))
    job.run("output.trace=true")
    whole = outcome(job.rows())
    job.output.unlink()
    (job.directory / "out.jsonl.summary.json").unlink()
    job.configure(**models, output={"path": str(job.output), "trace": True, "checkpoint_every": 0.02})

    rng = random.Random(SEED)
    killed = resumed = 0
    written = b""
    for _ in range(KILLS):
        said, alive = kill_at(job, rng.uniform(0, 0.6))
        killed += alive
        resumed += "going on with" in said
        assert job.output.read_bytes().startswith(written), said
        written = job.output.read_bytes().rpartition(b"\n")[0]
    assert killed == KILLS, f"the job ended before it could be killed for the {killed + 1}th time"
    assert resumed == KILLS - 1, said

    job.run()
    rows = job.rows()
    assert sorted(row["id"] for row in rows) == list(range(COUNT))
    assert outcome(rows) == whole
    assert not snapshot(job).exists()
