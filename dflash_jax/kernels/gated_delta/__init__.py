"""Gated DeltaNet: recurrent states in slots, read by blocks of tokens and written when those are accepted."""

from dflash_jax.kernels.gated_delta.api import (
    fold_block,
    gated_delta,
    gated_delta_block,
    gated_delta_prefill,
    write_rows,
)
from dflash_jax.kernels.gated_delta.parts import Ingredients, RowStates, gates

__all__ = [
    "Ingredients",
    "RowStates",
    "fold_block",
    "gated_delta",
    "gated_delta_block",
    "gated_delta_prefill",
    "gates",
    "write_rows",
]
