"""The matrix product as one op, dispatched to its implementations."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float

from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.dispatch import Implementation, choose

Layout = Literal["in_out", "out_in"]
"""Layout of a matrix: [inputs, outputs], or [outputs, inputs], which is native layout and that of an embedding."""


def matmul(
    x: Float[Array, "*batch inputs"],
    matrix: Float[Array, "rows columns"] | Compact,
    *,
    layout: Layout = "in_out",
    mixed: bool = False,
    wide: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "*batch outputs"]:
    """x times a matrix.

    Args:
      x: what is multiplied.
      matrix: [inputs, outputs] or [outputs, inputs], as `layout` says; a compact one is [outputs, inputs].
      layout: of the matrix.
      mixed: round both factors to bfloat16 and sum in float32.
      wide: return sums as they are, in float32 or better, instead of in the factors' dtype.
      implementation: overrides what the platform decides; see `kernels.dispatch`. "native" is for matrices in
        "out_in" and has no derivative.
    """
    compute = choose("matmul", implementation, x, matrix, layout, mixed).compute
    return compute(x, matrix, layout=layout, mixed=mixed, wide=wide)
