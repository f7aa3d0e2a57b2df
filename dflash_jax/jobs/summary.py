"""The figures of a job, as JSON beside its output."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_jax.acceptance import Acceptance, total_acceptance
from dflash_jax.errors import ConfigError, quote
from dflash_jax.jobs.ledger import Result
from dflash_jax.jobs.positions import Positions, positions_in
from dflash_jax.jobs.spread import Spread
from dflash_jax.writing import replace_file

REASONS = ("stop", "length", "abort", "error")


def summary_path(output: str | Path) -> Path:
    """Where the summary of an output file is: `out.jsonl` -> `out.jsonl.summary.json`.

    The whole name is in it, so that no two outputs share a summary, whatever dots their names have.
    """
    output = Path(output)
    return output.with_name(output.name + ".summary.json")


def figures(results: Iterable[Result]) -> dict[str, Any]:
    """Counts, acceptance and times over all results of an output file, whichever run wrote them."""
    reasons: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    times = {"ttft_s": Spread(), "tpot_s": Spread()}
    acceptance, positions = Acceptance(), Positions()
    for result in itertools.chain.from_iterable(result.get("samples") or (result,) for result in results):
        metrics = result.get("metrics") or {}
        reasons[result["finish_reason"]] += 1
        sums["prompt_tokens"] += result.get("prompt_tokens", 0)
        sums["output_tokens"] += len(result.get("token_ids", ()))
        sums["fallbacks"] += result.get("fallback") is not None
        acceptance += total_acceptance([metrics])
        positions += positions_in(result)
        for name in ("preemptions", "cached_tokens"):
            sums[name] += metrics.get(name) or 0
        for name, values in times.items():
            if metrics.get(name) is not None:
                values.add(metrics[name])
    return {
        "requests": {"total": reasons.total(), **{reason: reasons[reason] for reason in REASONS}},
        "prompt_tokens": sums["prompt_tokens"],
        "output_tokens": sums["output_tokens"],
        **acceptance.counts(),
        **acceptance.ratios(digits=6),
        "acceptance_by_position": {**positions.counts(), "rate": positions.rates()},
        **{name: values.figures() for name, values in times.items()},
        "fallbacks": sums["fallbacks"],
        "preemptions": sums["preemptions"],
        "cached_tokens": sums["cached_tokens"],
    }


def write_summary(output: str | Path, values: Mapping[str, Any]) -> Path:
    """Writes the summary of an output file, and returns where.

    Raises:
      ConfigError: it cannot be written.
    """
    path = summary_path(output)
    try:
        replace_file(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"the summary {path} cannot be written ({error.strerror})") from None
    return path


def read_summary(output: str | Path) -> dict[str, Any]:
    """The summary of an output file; nothing if there is none that can be read."""
    try:
        found = json.loads(summary_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_identity(output: str | Path, earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuses to add to an output file that was made under other settings.

    A file without a summary is not checked.

    Args:
      output: the file.
      earlier: its summary.
      settings: of this job, see `JobConfig.identity`.

    Raises:
      ConfigError: it was; the message names the first setting that differs.
    """
    recorded = earlier.get("settings")
    if not isinstance(recorded, dict):
        return
    differing = [name for name, value in settings.items() if name in recorded and recorded[name] != value]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{output} was made with {name} {quote(recorded[name])}, and this job has {quote(settings[name])}; "
            "give another output.path, or --overwrite to start it anew"
        )


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {name: importlib.metadata.version(name) for name in ("dflash_jax", "jax", "jaxlib")}
