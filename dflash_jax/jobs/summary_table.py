"""A job's summary as a person wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def summary_table(found: Mapping[str, Any]) -> Table:
    """The summary as a person wants it."""
    table = Table(show_header=False)
    requests = found["requests"]
    reasons = ", ".join(f"{requests[name]} {name}" for name in ("stop", "length", "error") if requests[name])
    table.add_row("requests", f"{requests['total']}" + (f" ({reasons})" if reasons else ""))
    table.add_row("prompt tokens", f"{found['prompt_tokens']:,}")
    table.add_row("output tokens", f"{found['output_tokens']:,}")
    if found["drafted_request_steps"]:
        table.add_row("accepted drafts", f"{found['accept_rate']:.1%} of {found['drafts_proposed']:,} tokens")
        table.add_row("mean acceptance length", f"{found['mean_acceptance_length']:.2f} tokens a round")
    rates = (found.get("acceptance_by_position") or {}).get("rate") or []
    if rates:
        table.add_row("kept by position", " ".join("-" if rate is None else f"{rate:.0%}" for rate in rates))
    if found["fallbacks"]:
        table.add_row("decoded without drafts", f"{found['fallbacks']} requests")
    if found["ttft_s"]:
        table.add_row("time to first token", f"{found['ttft_s']['p50']:.3f} s (median, queueing included)")
    if found["tpot_s"]:
        table.add_row("time per further token", f"{found['tpot_s']['p50'] * 1e3:.1f} ms (median)")
    if found["runs"]:
        run = found["runs"][-1]
        table.add_row("last run", f"{run['requests']} requests in {run['seconds']:.1f} s")
        if run["tokens_per_s"] is not None:
            table.add_row("throughput", f"{run['tokens_per_s']:,.1f} tokens/s")
        if compilation := run.get("compilation"):
            table.add_row(
                "compilation",
                f"{compilation['seconds']:.1f} s, in no other figure; {compilation['programs']} programs, "
                f"{compilation['cached']} of them out of the cache",
            )
    if found["compare_plain"]:
        compared = found["compare_plain"]
        spread = ""
        if "pairs" in compared:
            pairs = f"{compared['pairs']} pair{'s' * (compared['pairs'] != 1)}"
            spread = f", {compared['speedup_min']:.2f} to {compared['speedup_max']:.2f} in {pairs}"
        table.add_row(
            "speed-up by drafting",
            f"{compared['speedup']:.2f}{spread} ({compared['drafted_tokens_per_s']:,.1f} over "
            f"{compared['plain_tokens_per_s']:,.1f} tokens/s, {compared['requests']} requests)",
        )
        table.add_row("same greedy tokens", f"{compared['greedy_equal']} of {compared['greedy_requests']} requests")
    return table
