"""`best_tokens` in plain XLA operations, which is also its definition: all logits, then the best of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.product import RowMatrix


def head_logits(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "inputs outputs"] | RowMatrix,
    *,
    tied: bool,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> Float[Array, "*batch vocab"]:
    """Logits, in float32 or better, from factors of the weight's dtype; arguments as of `api.best_tokens`."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    equation = "...h,vh->...v" if tied else "...h,hv->...v"
    with jax.named_scope("lm_head"):
        if isinstance(weight, RowMatrix):
            logits = weight.product(hidden.astype(weight.dtype))
        else:
            logits = jnp.einsum(equation, hidden.astype(weight.dtype), weight, preferred_element_type=wide)
    if multiplier != 1:
        logits = logits * multiplier
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def best_tokens(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "inputs outputs"] | RowMatrix,
    *,
    tied: bool,
    top_k: int,
    multiplier: float,
    softcap: float | None,
) -> tuple[Float[Array, "*batch best"], Int[Array, "*batch best"]]:
    """See `api.best_tokens`."""
    logits = head_logits(hidden, weight, tied=tied, multiplier=multiplier, softcap=softcap)
    if top_k == 1:
        # Some backends make a sort over the vocabulary of the other.
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)[..., None]
        return jnp.take_along_axis(logits, tokens, axis=-1), tokens
    # With more dimensions than two, XLA makes a sort over the vocabulary of it on CPUs.
    found = jax.lax.top_k(logits.reshape(-1, logits.shape[-1]), top_k)
    values, tokens = (x.reshape(*logits.shape[:-1], top_k) for x in found)
    return values, tokens.astype(jnp.int32)
