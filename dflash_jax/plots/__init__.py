"""Pictures of what `dflash_jax.analysis` returns. Each function takes `ax`, or makes a figure, and returns its axes."""

from __future__ import annotations

from dflash_jax.plots.acceptance import (
    plot_comparison,
    plot_heat_map,
    plot_kinds,
    plot_over_time,
    plot_positions,
    plot_survival,
    plot_what_if,
)
from dflash_jax.plots.lattice import plot_lattice
from dflash_jax.plots.timeline import plot_timeline

__all__ = [
    "plot_comparison",
    "plot_heat_map",
    "plot_kinds",
    "plot_lattice",
    "plot_over_time",
    "plot_positions",
    "plot_survival",
    "plot_timeline",
    "plot_what_if",
]
