from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.recall_job import CASES, Job, prompt


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path)
    made.configure()
    made.prompts(*(prompt(index) for index in range(len(CASES))))
    return made
