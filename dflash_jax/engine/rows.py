"""Moving requests between rows. Each operation is a gather of `idx_mapping` and nothing else."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.engine.state import Rows

Index = int | Int[Array, ""]
"""A row or slot number; traced inside a jitted operation."""


def condense(rows: Rows) -> Rows:
    """Live rows to the front, in the order they have."""
    return _reorder(rows, rows.idx_mapping < 0)


def split(rows: Rows, first: Bool[Array, " slots"]) -> Rows:
    """Rows whose slot is in `first`, then the other live rows, then empty ones; each part in its order.

    With `first` the slots that decode, decodes come before prefills.
    """
    in_first = first[jnp.maximum(rows.idx_mapping, 0)]
    rank = jnp.where(rows.idx_mapping < 0, 2, jnp.where(in_first, 0, 1))
    return _reorder(rows, rank)


def swap(rows: Rows, a: Index, b: Index) -> Rows:
    """Rows a and b exchanged."""
    order = jnp.arange(rows.idx_mapping.shape[0]).at[jnp.array([a, b])].set(jnp.array([b, a]))
    return Rows(rows.idx_mapping[order])


def part(rows: Rows, first: Index, count: Index, size: int) -> Rows:
    """`count` rows from row `first` on, as a batch of their own, with empty rows up to `size`.

    Only these rows take part in the step that is given the batch: what lies behind them stays out of it,
    even where it would fit.
    """
    order = first + jnp.arange(size)
    taken = jnp.take(rows.idx_mapping, order, mode="fill", fill_value=-1)
    return Rows(jnp.where(jnp.arange(size) < count, taken, -1))


def resize(rows: Rows, size: int) -> Rows:
    """The batch grown or shrunk to `size` rows.

    Shrinking drops the last rows, which must be empty: condense first. Their slots would otherwise
    live on in no row.
    """
    return part(rows, 0, size, size)


def assign(rows: Rows, row: Index, slot: Index) -> Rows:
    """The batch with `slot` in `row`; -1 empties the row."""
    return Rows(rows.idx_mapping.at[row].set(slot))


def vacate(rows: Rows, slot: Index) -> Rows:
    """The batch without `slot`, its row left empty."""
    return Rows(jnp.where(rows.idx_mapping == slot, -1, rows.idx_mapping))


def _reorder(rows: Rows, rank: Int[Array, " rows"] | Bool[Array, " rows"]) -> Rows:
    return Rows(rows.idx_mapping[jnp.argsort(rank, stable=True)])
