"""A sweep as a table, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from dflash_jax.errors import ConfigError, quote
from dflash_jax.writing import replace_file, replacing


def write_sweep(directory: str | Path, found: Mapping[str, Any]) -> tuple[Path, Path]:
    """Writes `sweep.json` and `sweep.png` in place of earlier ones, and returns their paths.

    Raises:
      ConfigError: they cannot be written.
    """
    directory = Path(directory)
    figures, plot = directory / "sweep.json", directory / "sweep.png"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(figures, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        with replacing(plot) as scratch:
            FigureCanvasAgg(plot_sweep(found)).print_png(str(scratch))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the figures cannot be written to {quote(str(directory))} ({reason})") from None
    return figures, plot


def sweep_table(found: Mapping[str, Any]) -> Table:
    """A row for each level. Times are medians; in `a / b`, a is with speculation and b without."""
    title = f"k = {found['k']}, {found['prompts']['tokens']} + {found['output_tokens']} tokens; with / without"
    table = Table(title=title, padding=(0, 0))
    for name in ("slots", "tokens/s", "ratio", "TPOT ms", "TTFT ms", "accepted", "tok/round", "done", "failed"):
        table.add_column(name, justify="right")
    for level in found["levels"]:
        on, off = level["on"], level["off"]
        accepted, length = on["accept_rate"], on["mean_acceptance_length"]
        table.add_row(
            str(level["concurrency"]),
            f"{on['output_tokens_per_s']:,.0f}/{off['output_tokens_per_s']:,.0f}",
            f"{level['ratio']:.2f}",
            *(f"{_milliseconds(on[name])}/{_milliseconds(off[name])}" for name in ("tpot_s", "ttft_s")),
            "-" if accepted is None else f"{accepted:.4f}",
            "-" if length is None else f"{length:.3f}",
            str(on["completed"] + off["completed"]),
            str(on["failed"] + off["failed"]),
        )
    return table


def plot_sweep(found: Mapping[str, Any]) -> Figure:
    """Throughput both ways, their ratio, and acceptance, over concurrency."""
    levels = found["levels"]
    slots = [level["concurrency"] for level in levels]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    speed, ratio, acceptance = figure.subplots(1, 3)
    for way, label in (("on", "with speculation"), ("off", "without")):
        speed.plot(slots, [level[way]["output_tokens_per_s"] for level in levels], marker="o", label=label)
    speed.set(title="output tokens per second", ylim=(0, None))
    speed.legend()
    ratio.plot(slots, [level["ratio"] for level in levels], marker="o")
    ratio.axhline(1, color="grey", linewidth=1)
    ratio.set(title="on / off", ylim=(0, None))
    lengths = [level["on"]["mean_acceptance_length"] or 1 for level in levels]
    acceptance.plot(slots, lengths, marker="o")
    acceptance.set(title="mean acceptance length", ylim=(0, 1 + found["k"]))
    for axes in (speed, ratio, acceptance):
        axes.set(xlabel="requests in flight", xscale="log")
        axes.set_xticks(slots, [str(count) for count in slots])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{found['draft']}, k = {found['k']}, on {found['device']}")
    return figure


def _milliseconds(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median'] * 1e3:.1f}"
