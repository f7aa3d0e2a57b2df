"""Compact matrices of every format, drawn at random."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dflash_jax.kernels.compact import FORMATS, GROUP_UNIT, Compact, compact


def draw(format: str, outputs: int, units: int, seed: int, halves: float | None = None) -> Compact:
    """A matrix of any codes; rows of `units` units, or of 13 inputs for each where a unit is one input.

    Args:
      format: its format.
      outputs, units: its size.
      seed: of the numbers.
      halves: what every scale and offset is; they are drawn too by default.
    """
    rng, kind = np.random.default_rng(seed), FORMATS[format]
    if kind.halves:
        codes = rng.integers(0, 256, (outputs, units, kind.size), np.uint8)
        for at in kind.halves:
            drawn = rng.normal(size=(outputs, units, 1)) if halves is None else np.full((outputs, units, 1), halves)
            codes[..., at : at + 2] = drawn.astype(np.float16).view(np.uint8)
        return compact(codes.reshape(outputs, -1), format)
    inputs = 13 * units
    if not kind.scaled:
        return compact(rng.normal(size=(outputs, inputs)).astype(kind.dtype_of_codes), format)
    codes = rng.integers(0, 256, (outputs, inputs), np.uint8)
    if format == "F8_E4M3":
        codes[codes & 0x7F == 0x7F] = 0
    group = int(rng.choice([GROUP_UNIT, 2 * GROUP_UNIT, max(inputs, 1), inputs + 5]))
    scales = (
        rng.normal(size=(outputs, -(-inputs // group)))
        if halves is None
        else np.full((outputs, -(-inputs // group)), halves)
    )
    return compact(codes.view(ml_dtypes.float8_e4m3fn if format == "F8_E4M3" else np.int8), format, scales, group)
