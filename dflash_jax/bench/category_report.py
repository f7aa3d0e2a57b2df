"""Acceptance by category as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from dflash_jax.errors import ConfigError, quote
from dflash_jax.writing import replace_file


def category_table(found: Mapping[str, Any]) -> Table:
    """A row for each category, one for all rounds alike, and one for the mean of the categories."""
    plain = "speedup" in found["overall"]
    table = Table(title=f"{found['draft']}, k = {found['k']}, temperature {found['temperature']:g}")
    table.add_column("category")
    for name in ("questions", "answers", "tokens", "rounds", "acceptance length", "accepted", "tokens/s"):
        table.add_column(name, justify="right")
    if plain:
        table.add_column("speed-up", justify="right")
    for name, each in found["categories"].items():
        table.add_row(name, *_cells(each, plain))
    table.add_section()
    table.add_row("overall", *_cells(found["overall"], plain))
    mean = found["mean_of_categories"]
    table.add_row("mean of categories", "", "", "", "", "-" if mean is None else f"{mean:.3f}")
    return table


def write_categories(directory: str | Path, found: Mapping[str, Any]) -> Path:
    """Writes `prompts.json`, and returns its path.

    Raises:
      ConfigError: it cannot be written.
    """
    file = Path(directory) / "prompts.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the figures cannot be written to {quote(str(directory))} ({error.strerror or error})"
        ) from None
    return file


def _cells(each: Mapping[str, Any], plain: bool) -> list[str]:
    length, rate, speed = each["mean_acceptance_length"], each["accept_rate"], each["tokens_per_s"]
    cells = [
        f"{each['questions']:,}",
        f"{each['answers']:,}" + (f" ({each['failed']:,} failed)" if each["failed"] else ""),
        f"{each['output_tokens']:,}",
        f"{each['drafted_request_steps']:,}",
        "-" if length is None else f"{length:.3f}",
        "-" if rate is None else f"{rate:.1%}",
        "-" if speed is None else f"{speed:,.1f}",
    ]
    if plain:
        speedup = each.get("speedup")
        cells.append("-" if speedup is None else f"{speedup:.2f}")
    return cells
