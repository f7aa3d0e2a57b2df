"""A job's memory does not grow with its rows. The engine is a stand-in that answers at once, so that there can be many.

`benchmarks/job_memory.py` measures a real one.
"""

from __future__ import annotations

import gc
import types
from collections import deque

import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest

from dflash_jax.engine.output import Completion, Metrics, Update
from dflash_jax.jobs.console import JobConsole
from dflash_jax.jobs.formats import read_output
from tests.slow import mostly_slow

ROWS, FEW = 24_000, 6_000
"""Rows of a job, and after how many the memory of what is needed once is there."""

MOST_GROWTH = 6 << 20
"""Bytes, over the later rows. What a job keeps of each in memory would take more."""

METRICS = Metrics(3, 2, 1, 0.6667, 3.0, 0.25, 0.01, 0, 0)


class Instant:
    """An engine that answers every request in the step after it came."""

    def __init__(self, grown):
        self._waiting, self._made, self._grown = deque(), 0, grown
        self.host = types.SimpleNamespace(in_flight=())

    @property
    def has_work(self):
        return bool(self._waiting)

    def tokenize(self, prompt):
        return prompt

    def add_request(self, prompt, sampling, request_id):
        self._waiting.append(request_id)
        return request_id

    def step(self):
        updates = []
        while self._waiting:
            name = self._waiting.popleft()
            done = Completion(name, 6, (1, 2, 3), "x" * 50, "length", None, None, METRICS, (2,), ((1, 2),), (2,))
            updates.append(Update(name, (1, 2, 3), "", done))
            self._made += 1
            if self._made in (FEW, ROWS):
                gc.collect()
                pa.default_memory_pool().release_unused()
                self._grown.append(psutil.Process().memory_info().rss)
        return updates

    def warmup(self, **_):
        pass

    def counters(self):
        return {}


class Quiet(JobConsole):
    def loaded(self, engine, seconds):
        pass


@pytest.mark.parametrize("output", mostly_slow("out.parquet", "out.jsonl", "openai"))
def test_a_jobs_memory_does_not_grow_with_its_rows(job, output):
    names = [f"{number:06d} of a table with long names: {'x' * 400}" for number in range(ROWS)]
    table = pa.table({"id": names, "prompt_token_ids": [[1, 2, 3, 4, 5, 6]] * ROWS})
    pyarrow.parquet.write_table(table, job.directory / "in.parquet", row_group_size=1000)
    del table
    path = job.directory / output
    form = {"format": "openai"} if output == "openai" else {}
    job.configure(
        input={"path": str(job.directory / "in.parquet")}, output={"path": str(path), "row_group": 1000, **form}
    )
    memory = []
    found = job.run(load=lambda *_, **__: Instant(memory), console=Quiet(quiet=True))
    early, late = memory
    print(f"{output}: {early / 2**20:.0f} MiB after {FEW} rows, {late / 2**20:.0f} MiB after {ROWS}")
    assert found["requests"]["total"] == ROWS
    assert sorted(row["id"] for row in read_output(path)) == names
    assert late - early < MOST_GROWTH
