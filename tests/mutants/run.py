"""Applies each mutant to a copy of the package and requires its gate to fail for the stated reason.

python -m tests.mutants.run [--jobs 2] [--only WORDS] [--table docs/mutants.md]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def copy_package(directory: Path) -> None:
    """A tree that pytest can run in, with the package copied and the tests linked."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dflash_jax", directory / "dflash_jax", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", directory)
    (directory / "tests").symlink_to(ROOT / "tests")


def apply(mutant: Mutant, directory: Path) -> None:
    """Edits the copy; the text to replace must be there exactly once."""
    for name, old, new in mutant.edits:
        file = directory / "dflash_jax" / name
        text = file.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"mutant {mutant.name!r}: {name} has its text {text.count(old)} times, not once: {old!r}")
        file.write_text(text.replace(old, new))


def run_gate(mutant: Mutant, *, mutated: bool) -> tuple[bool, str]:
    """Runs a mutant's gate on a copy; whether it passed, and what it printed."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        copy_package(directory)
        if mutated:
            apply(mutant, directory)
        environment = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        # Gates may be among the tests that a quick run leaves out.
        command += ["-m", "", mutant.gate]
        try:
            done = subprocess.run(
                command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return False, "timed out"
        if done.returncode not in (0, 1):
            return (
                True,
                f"the gate could not be run (exit {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}",
            )
        return done.returncode == 0, done.stdout


def judge(mutant: Mutant) -> tuple[Mutant, str, float]:
    """ "" if the gate caught the mutant, or what is wrong."""
    begin = time.perf_counter()
    passed, output = run_gate(mutant, mutated=True)
    if passed:
        found = f"its gate did not fail: {output[-1500:]}"
    elif not re.search(mutant.reason, output):
        found = f"its gate failed for another reason than {mutant.reason!r}:\n{output[-1500:]}"
    else:
        found = ""
    return mutant, found, time.perf_counter() - begin


def table() -> str:
    """The mutants and their gates, as Markdown."""
    lines = [
        "# Mutants",
        "",
        "Each mutant, a small edit, is applied to a copy of the package by `python -m tests.mutants.run`, and the test "
        "named beside it must then fail.",
        "",
        "| mutant | caught by |",
        "|---|---|",
    ]
    lines += [f"| {mutant.name} | `{mutant.gate.removeprefix('tests/')}` |" for mutant in MUTANTS]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="run the mutants whose name or gate contains this")
    parser.add_argument("--table", help="write the table of mutants to this file and exit")
    options = parser.parse_args()
    if options.table:
        Path(options.table).write_text(table())
        return
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name or options.only in mutant.gate]
    missed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, wrong, seconds in pool.map(judge, chosen):
            print(f"{'MISSED' if wrong else 'caught'} {seconds:5.0f} s  {mutant.name}, by {mutant.gate}", flush=True)
            if wrong:
                print(wrong, flush=True)
                missed += 1
    print(f"{len(chosen) - missed} passed, {missed} failed")
    sys.exit(1 if missed or not chosen else 0)


if __name__ == "__main__":
    main()
