"""Acceptance by kind of prompt and by position, from the answers of jobs that kept their traces.

    dflash-jax generate drafters/smollm2-dflash2/held-out.yaml
    python benchmarks/acceptance.py "DFlash 2=runs/held-out.jsonl" --plot acceptance.png

Ids of prompts are KIND-NUMBER. A position's acceptance is the share of whole rounds in which the token drafted there
was kept; a round that the end of the answer cut short counts for none.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np


def accepted_per_round(result: dict) -> list[int]:
    """Drafted tokens kept in each round but the last, which may have been cut short."""
    return [produced - 1 for produced in result["trace"]["produced_per_round"]][:-1]


def by_kind(results: list[dict]) -> dict[str, float]:
    """Mean acceptance length of each kind of prompt, and of all."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for result in results:
        kinds[result["id"].split("-")[0]] += accepted_per_round(result)
    kinds["all"] = [kept for found in kinds.values() for kept in found]
    return {kind: 1 + float(np.mean(kept)) for kind, kept in kinds.items()}


def by_position(results: list[dict]) -> list[float]:
    """Share of rounds in which each position's token was kept."""
    kept = np.array([kept for result in results for kept in accepted_per_round(result)])
    drafts = max(len(block) for result in results for block in result["trace"]["drafted_blocks"])
    return [float(np.mean(kept > position)) for position in range(drafts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=OUTPUT.jsonl")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    runs = {}
    for named in options.runs:
        label, _, path = named.partition("=")
        runs[label] = [one for one in map(json.loads, Path(path).read_text().splitlines()) if one.get("trace")]

    lengths = {label: by_kind(results) for label, results in runs.items()}
    positions = {label: by_position(results) for label, results in runs.items()}
    print("| kind | " + " | ".join(runs) + " |\n|---|" + "---|" * len(runs))
    for kind in next(iter(lengths.values())):
        print(f"| {kind} | " + " | ".join(f"{lengths[label].get(kind, float('nan')):.2f}" for label in runs) + " |")
    for position in range(max(map(len, positions.values()))):
        shares = [found[position] if position < len(found) else float("nan") for found in positions.values()]
        print(f"| kept at position {position + 1} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")

    if options.plot:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for label, shares in positions.items():
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=f"{label}: {lengths[label]['all']:.2f} a round")
        axes.set_xlabel("drafted position")
        axes.set_ylabel("share of rounds in which it was kept")
        axes.set_xticks(range(1, max(map(len, positions.values())) + 1))
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
