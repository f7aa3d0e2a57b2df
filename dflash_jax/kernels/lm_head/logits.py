"""The LM head's logits: a matrix product, scaled and capped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.matmul import Layout, matmul


def head_logits(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "rows columns"] | Compact,
    *,
    layout: Layout,
    multiplier: float = 1.0,
    softcap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*batch vocab"]:
    """Logits, in float32 or better, from factors of the weight's dtype; arguments as of `api.best_tokens`."""
    with jax.named_scope("lm_head"):
        logits = matmul(hidden.astype(weight.dtype), weight, layout=layout, wide=True, implementation=implementation)
    return scale_logits(logits, multiplier, softcap)


def scale_logits(
    logits: Float[Array, "*batch vocab"], multiplier: float, softcap: float | None
) -> Float[Array, "*batch vocab"]:
    """Products of hidden states and a head, scaled and capped."""
    if multiplier != 1:
        logits = logits * multiplier
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
