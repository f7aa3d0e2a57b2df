"""`best_tokens` on CPUs: the head's product from C++ where `matmul` takes it, and XLA's choice of the best."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.lm_head.logits import head_logits
from dflash_jax.kernels.lm_head.xla import best_of
from dflash_jax.kernels.matmul import Layout


def best_tokens(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "rows columns"] | Compact,
    *,
    layout: Layout,
    top_k: int,
    multiplier: float,
    softcap: float | None,
) -> tuple[Float[Array, "*batch best"], Int[Array, "*batch best"]]:
    """See `api.best_tokens`."""
    return best_of(head_logits(hidden, weight, layout=layout, multiplier=multiplier, softcap=softcap), top_k)
