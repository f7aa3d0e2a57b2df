"""A job on a recall pair, for tests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from dflash_jax.jobs.config import load_job
from dflash_jax.jobs.generate import run_job

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "recall-dflash2.json").read_text())["cases"]
# One set of shapes for all tests, so that each program is compiled once.
ENGINE = {"max_slots": 3, "max_model_len": 160, "page_size": 16, "strict": True}


@dataclasses.dataclass
class Job:
    """A job in a directory of its own, on a recall pair."""

    directory: Path

    @property
    def config(self) -> Path:
        return self.directory / "job.yaml"

    @property
    def output(self) -> Path:
        return self.directory / "out.jsonl"

    def configure(self, **sections: Any) -> Path:
        values = {
            "target": {"path": str(GOLDEN / "recall-target")},
            "draft": {"path": str(GOLDEN / "recall-dflash2"), "width": 7},
            "engine": ENGINE,
            "sampling": {"max_tokens": 48},
            "input": {"path": str(self.directory / "in.jsonl")},
            "output": {"path": str(self.output)},
            **sections,
        }
        self.config.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
        return self.config

    def prompts(self, *lines: Any) -> None:
        """Writes the input; what is not bytes yet becomes a line of JSON."""
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (self.directory / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in raw))

    def run(self, *overrides: str, **options: Any) -> dict[str, Any]:
        return run_job(load_job(self.config, overrides), **options)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().split(b"\n")[:-1]]

    def row(self, item_id: Any) -> dict[str, Any]:
        (row,) = [row for row in self.rows() if row["id"] == item_id]
        return row

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "out.jsonl.summary.json").read_text())


def prompt(case: int, item_id: Any = None, **more: Any) -> dict[str, Any]:
    """An input line with a golden prompt."""
    return {"id": f"case-{case}" if item_id is None else item_id, "prompt_token_ids": CASES[case]["prompt"], **more}
