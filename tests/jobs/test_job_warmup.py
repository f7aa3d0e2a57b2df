"""A job compiles what it will need before its first request, and only that."""

from __future__ import annotations

import jax
import pytest

from dflash_jax.compiling import CompileWatch
from dflash_jax.engine import Engine
from dflash_jax.jobs.console import JobConsole
from dflash_jax.programs import clear_programs


class Noting(JobConsole):
    def __init__(self):
        super().__init__(quiet=True)
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Counting(Engine):
    """Counts the programs that are made while it steps."""

    made = 0

    def step(self):
        with CompileWatch() as watch:
            found = super().step()
        Counting.made += watch.programs
        return found


@pytest.fixture(autouse=True)
def nothing_compiled():
    clear_programs()
    jax.clear_caches()
    Counting.made = 0


def test_a_job_compiles_nothing_once_it_steps(job):
    console = Noting()
    found = job.run("report.compare_plain=true", "report.compare_tokens=8", console=console, load=Counting.from_config)
    assert Counting.made == 0
    [said] = [note for note in console.notes if note.startswith("prepared ")]
    prepared = int(said.split()[1])
    assert 0 < prepared <= found["runs"][-1]["compilation"]["programs"]


def test_a_job_that_shall_not_compiles_as_it_goes(job):
    console = Noting()
    job.run("engine.warmup=false", console=console, load=Counting.from_config)
    assert Counting.made > 0 and not [note for note in console.notes if note.startswith("prepared ")]
