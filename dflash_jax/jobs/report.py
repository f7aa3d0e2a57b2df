"""What a job came to, out of its output and summary: tables, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dflash_jax.errors import ConfigError, quote
from dflash_jax.jobs import summary
from dflash_jax.jobs.formats import read_output
from dflash_jax.writing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS_PER_TOKEN = 4
"""Of the histogram of acceptance lengths."""


def read_report(output: str | Path) -> dict[str, Any]:
    """The figures of an output as it is now, with what its summary says of its runs.

    Adds `lengths`: how many answers had which mean acceptance length, in quarters of a token.

    Raises:
      ConfigError: there is no output, or it cannot be read.
    """
    output = Path(output)
    if not output.exists():
        raise ConfigError(f"there is no output {quote(str(output))}; give what a job's config has as output.path")
    lengths: Counter[float] = Counter()

    def counted() -> Any:
        for result in read_output(output):
            length = (result.get("metrics") or {}).get("mean_acceptance_length")
            if length is not None:
                lengths[round(length * _BINS_PER_TOKEN) / _BINS_PER_TOKEN] += 1
            yield result

    found = summary.figures(counted())
    told = summary.read_summary(output)
    return {
        "status": told.get("status", "without a summary"),
        "output": str(output),
        **found,
        "compare_plain": told.get("compare_plain"),
        "runs": told.get("runs") or [],
        "lengths": dict(sorted(lengths.items())),
    }


def position_table(found: Mapping[str, Any]) -> Table | None:
    """Acceptance by position; None if nothing was drafted, or the rows are of a version that did not count it."""
    positions = found.get("acceptance_by_position") or {}
    if not positions.get("reached"):
        return None
    table = Table(title="drafted tokens by position")
    for name in ("position", "reached", "kept", "rate", "all up to it kept"):
        table.add_column(name, justify="right")
    survival = 1.0
    for place, (reached, kept) in enumerate(zip(positions["reached"], positions["kept"], strict=True), start=1):
        survival *= kept / reached if reached else 0.0
        rate = f"{kept / reached:.1%}" if reached else "-"
        table.add_row(str(place), f"{reached:,}", f"{kept:,}", rate, f"{survival:.1%}")
    return table


def run_table(found: Mapping[str, Any]) -> Table | None:
    """A row for each run that added answers; compilation has a column of its own, and is in no speed."""
    if not found["runs"]:
        return None
    table = Table(title="runs")
    for name in ("run", "answers", "tokens", "seconds", "tokens/s", "compilation s", "programs"):
        table.add_column(name, justify="right")
    for number, run in enumerate(found["runs"], start=1):
        compilation = run.get("compilation") or {}
        rate = run.get("tokens_per_s")
        table.add_row(
            str(number),
            f"{run['requests']:,}",
            f"{run['output_tokens']:,}",
            f"{run['seconds']:,.1f}",
            "-" if rate is None else f"{rate:,.1f}",
            f"{compilation.get('seconds', 0.0):,.1f}",
            f"{compilation.get('programs', 0):,}",
        )
    return table


def plot_report(found: Mapping[str, Any]) -> Figure:
    """Acceptance by position, acceptance lengths of the answers, why they ended, and the speed of each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    (by_position, lengths), (ends, speed) = figure.subplots(2, 2)
    positions = found.get("acceptance_by_position") or {"reached": [], "kept": []}
    rates = [k / r if r else 0.0 for r, k in zip(positions["reached"], positions["kept"], strict=True)]
    places = range(1, len(rates) + 1)
    by_position.bar(places, rates, label="kept, if all before were")
    survival, all_kept = 1.0, []
    for rate in rates:
        survival *= rate
        all_kept.append(survival)
    by_position.plot(places, all_kept, color="C1", marker="o", label="all up to it kept")
    by_position.set(title="drafted tokens by position", xlabel="position", ylim=(0, 1))
    by_position.set_xticks(list(places))
    if rates:
        by_position.legend()
    lengths.bar(list(found["lengths"]), list(found["lengths"].values()), width=0.8 / _BINS_PER_TOKEN)
    lengths.set(title="mean acceptance length of each answer", xlabel="tokens a round", ylabel="answers")
    reasons = [reason for reason in summary.REASONS if found["requests"][reason]]
    ends.barh(reasons, [found["requests"][reason] for reason in reasons])
    ends.set(title="how requests ended", xlabel="requests")
    runs = found["runs"]
    numbers = [str(number) for number in range(1, len(runs) + 1)]
    speed.bar(numbers, [run.get("tokens_per_s") or 0.0 for run in runs])
    speed.set(title="tokens per second of each run, without compilation", xlabel="run")
    figure.suptitle(f"{found['output']}: {found['requests']['total']:,} results, {found['output_tokens']:,} tokens")
    return figure


def write_plot(found: Mapping[str, Any], path: Path) -> None:
    """Draws the report into a PNG file.

    Raises:
      ConfigError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    try:
        with replacing(path) as scratch:
            FigureCanvasAgg(plot_report(found)).print_png(str(scratch))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the picture {quote(str(path))} cannot be written ({why})") from None
