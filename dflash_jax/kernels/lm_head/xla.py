"""`best_tokens` in plain XLA operations, which is also its definition: all logits, then the best of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.lm_head.logits import head_logits
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
    logits = head_logits(hidden, weight, layout=layout, multiplier=multiplier, softcap=softcap, implementation="xla")
    return best_of(logits, top_k)


def best_of(
    logits: Float[Array, "*batch vocab"], top_k: int
) -> tuple[Float[Array, "*batch best"], Int[Array, "*batch best"]]:
    """The largest logits and their tokens."""
    if top_k == 1:
        # Some backends make a sort over the vocabulary of the other.
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)[..., None]
        return jnp.take_along_axis(logits, tokens, axis=-1), tokens
    # With more dimensions than two, XLA makes a sort over the vocabulary of it on CPUs.
    found = jax.lax.top_k(logits.reshape(-1, logits.shape[-1]), top_k)
    values, tokens = (x.reshape(*logits.shape[:-1], top_k) for x in found)
    return values, tokens.astype(jnp.int32)
