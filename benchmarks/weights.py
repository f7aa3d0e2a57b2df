"""Tokens a second of decoding with one model's weights held in different ways, plain and drafted, in turns.

    python benchmarks/weights.py [--config configs/quickstart.yaml] [--tokens 64] [--turns 5] [--llama-bench PATH]

Each engine answers the same prompts; what a row tells is the median of the turns, in tokens a second after the first
token of each answer. Answers of float32 and of the file's own bits, plain and drafted, are compared as well. With
`--llama-bench` (or $LLAMA_BENCH), the path of llama.cpp's program, that runs in the same turns, on the same GGUF file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess

import jax

from dflash_jax import Engine
from dflash_jax.checkpoints.sources import resolve
from dflash_jax.settings import read_settings

_KINDS = {
    "float32": {"target": {"weights": "float32"}},
    "bfloat16": {"target": {"weights": "bfloat16"}},
    "file": {"target": {"weights": "file"}},
    "bfloat16-and-activations": {"target": {"weights": "bfloat16"}, "engine": {"dtype": "bfloat16"}},
}


def make(settings: dict, kind: dict, drafted: bool) -> Engine:
    """An engine of a config whose weights are held as a kind says."""
    sections = {name: settings[name] | kind.get(name, {}) for name in ("target", "engine")}
    return Engine.from_config(sections | ({"draft": settings["draft"]} if drafted else {}))


def decode(engine: Engine, prompts: list, tokens: int) -> tuple[float, list]:
    """Tokens a second after the first of each answer, and the answers."""
    made, took, answers = 0, 0.0, []
    for prompt in prompts:
        [done] = engine.generate([prompt], {"max_tokens": tokens, "ignore_eos": True})
        made += len(done.token_ids) - 1
        took += done.metrics.tpot_s * (len(done.token_ids) - 1)
        answers.append(tuple(done.token_ids))
    return made / took, answers


def llama(program: str, file: str, tokens: int, threads: int) -> float:
    """llama.cpp's tokens a second, decoding plainly."""
    command = [program, "-m", file, "-p", "0", "-n", str(tokens), "-t", str(threads), "-r", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]["avg_ts"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kinds", default="float32,bfloat16,file", help=", ".join(_KINDS))
    parser.add_argument("--llama-bench", default=os.environ.get("LLAMA_BENCH"))
    options = parser.parse_args()
    settings = read_settings(options.config)
    with open(settings["input"]["path"]) as lines:
        prompts = [json.loads(line) for line in lines][: options.prompts]
    prompts = [line.get("messages") or line["prompt"] for line in prompts]
    engines = {
        (kind, drafted): make(settings, _KINDS[kind], drafted)
        for kind in options.kinds.split(",")
        for drafted in (False, True)
    }
    file = str(resolve(settings["target"]["path"], None, settings["target"].get("file")))
    speeds: dict = {key: [] for key in engines}
    answers: dict = {}
    outside: list[float] = []
    for turn in range(1 + options.turns):
        for key, engine in engines.items():
            speed, answers[key] = decode(engine, prompts, options.tokens)
            speeds[key] += [speed] if turn else []
        if options.llama_bench and turn:
            outside.append(llama(options.llama_bench, file, options.tokens, len(os.sched_getaffinity(0))))
    print(f"{'weights':>26} {'MB':>7} {'plain':>8} {'drafted':>8}  same answers as plain float32: plain, drafted")
    first = answers.get(("float32", False))
    for kind in dict.fromkeys(kind for kind, _ in engines):
        leaves = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(engines[kind, False].models.target)}
        plain, drafted = (statistics.median(speeds[kind, way]) for way in (False, True))
        same = "-"
        if first is not None:
            pairs = [zip(answers[kind, way], first, strict=True) for way in (False, True)]
            same = ", ".join(f"{sum(a == b for a, b in pair)}/{len(first)}" for pair in pairs)
        print(f"{kind:>26} {sum(leaves.values()) / 1e6:7.1f} {plain:8.1f} {drafted:8.1f}  {same}")
    if outside:
        print(f"{'llama.cpp, the file':>26} {'':>7} {statistics.median(outside):8.1f}")


if __name__ == "__main__":
    main()
