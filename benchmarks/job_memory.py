"""Whether a job's memory grows with its rows: many short answers on the recall pair, out of Parquet and into Parquet.

The job runs in a process of its own, and its resident memory is printed as its rows come. With `--kills` it is killed
so often on the way, at random points, and run again; at the end no row may be missing and none there twice.

    python benchmarks/job_memory.py [--rows 200000] [--kills 3] [--output parquet|jsonl|openai]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet

from dflash_jax.jobs.formats import read_output

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/golden"
_WRITTEN = 1 << 14
"""Rows of the input that are made at once."""

_OUTPUTS = {"parquet": "out.parquet", "jsonl": "out.jsonl", "openai": "out.openai.jsonl"}


def write_input(path: Path, rows: int) -> None:
    """A table of short prompts, each of its own."""
    rng = np.random.default_rng(0)
    schema = pyarrow.schema([("id", pyarrow.string()), ("prompt_token_ids", pyarrow.list_(pyarrow.int32()))])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, _WRITTEN):
            count = min(_WRITTEN, rows - start)
            prompts = rng.integers(0, 64, (count, 6)).tolist()
            ids = [f"row {number}" for number in range(start, start + count)]
            writer.write_table(pyarrow.table({"id": ids, "prompt_token_ids": prompts}, schema=schema))


def write_config(directory: Path, output: str) -> Path:
    """A job of a few tokens a row."""
    config = {
        "target": {"path": str(GOLDEN / "recall-target")},
        "draft": {"path": str(GOLDEN / "recall-dflash2"), "width": None},
        "engine": {"max_slots": 64, "max_model_len": 32, "prefix_cache": False, "rounds_per_step": 2},
        "sampling": {"max_tokens": 2},
        "input": {"path": str(directory / "in.parquet")},
        "output": {"path": str(directory / _OUTPUTS[output]), "format": output},
    }
    path = directory / "job.json"
    path.write_text(json.dumps(config))
    return path


def run(config: Path, output: Path, kill_after: float | None, begin: float) -> tuple[bool, list[tuple[float, int]]]:
    """Runs the job, or kills it so many seconds after its first rows; whether it ended by itself, and its memory."""
    command = [sys.executable, "-m", "dflash_jax", "generate", str(config), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    before, writing = stored(output), None
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    watched, found = psutil.Process(process.pid), []
    while process.poll() is None:
        found.append((time.monotonic() - begin, watched.memory_info().rss))
        if writing is None and stored(output) != before:
            writing = time.monotonic()
        if kill_after is not None and writing is not None and time.monotonic() - writing > kill_after:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False, found
        time.sleep(0.25)
    if process.returncode:
        sys.exit(f"the job ended with {process.returncode}")
    return True, found


def stored(output: Path) -> int:
    """Bytes of an output."""
    files = output.iterdir() if output.is_dir() else [output] if output.exists() else []
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", choices=sorted(_OUTPUTS), default="parquet")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_input(directory / "in.parquet", options.rows)
        config = write_config(directory, options.output)
        output = directory / _OUTPUTS[options.output]
        begin = time.monotonic()
        for number in range(options.kills):
            ended, found = run(config, output, rng.uniform(1, 30), begin)
            if ended:
                sys.exit(f"the job ended before its kill number {number + 1}; give it more --rows")
            print(
                f"killed with {sum(1 for _ in read_output(output))} rows, at {found[-1][1] / 2**20:.0f} MiB", flush=True
            )
        _, found = run(config, output, None, begin)
        size = len(found)
        for share in (0.25, 0.5, 0.75, 1.0):
            seconds, memory = found[max(0, int(size * share) - 2)]
            print(f"after {seconds:.0f} s: {memory / 2**20:.0f} MiB")
        print(f"at most {max(memory for _, memory in found) / 2**20:.0f} MiB")
        ids = [row["id"] for row in read_output(output)]
        print(f"{len(ids)} rows, {len(set(ids))} ids, {options.rows} asked for")
        if sorted(ids) != sorted(f"row {number}" for number in range(options.rows)):
            sys.exit("rows are missing, or there twice")


if __name__ == "__main__":
    main()
