"""The LM head followed by a choice of its best tokens, as one op, and the choice of what computes it."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from dflash_jax.kernels.choice import Implementation, choose
from dflash_jax.kernels.lm_head import pallas, xla
from dflash_jax.kernels.product import RowMatrix


def best_tokens(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "inputs outputs"] | RowMatrix,
    *,
    tied: bool,
    top_k: int,
    multiplier: float = 1.0,
    softcap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*batch best"], Int[Array, "*batch best"]]:
    """The `top_k` tokens of largest logit and their logits, best first; of equal ones the lowest ids.

    Args:
      hidden: final hidden states, normalised.
      weight: [vocab, hidden] if tied, else [hidden, vocab]; of a `RowMatrix`, `tied` says nothing.
      tied: whether the head is the transposed embedding.
      top_k: how many; 1 is the argmax.
      multiplier: scales the logits.
      softcap: caps them after that, to softcap * tanh(logits / softcap); None for no cap.
      implementation: overrides what the platform decides; see `kernels.choice`. "pallas" writes no
        logits to memory.
    """
    fused = _is_fused(hidden, weight, tied, top_k, implementation)
    compute: Callable = pallas.best_tokens if fused else xla.best_tokens
    return compute(hidden, weight, tied=tied, top_k=top_k, multiplier=multiplier, softcap=softcap)


def writes_logits(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "inputs outputs"] | RowMatrix,
    *,
    tied: bool,
    implementation: Implementation | None = None,
) -> bool:
    """Whether the argmax by `best_tokens` writes all logits to memory, where others may as well use them."""
    return not _is_fused(hidden, weight, tied, 1, implementation)


def _is_fused(hidden, weight, tied: bool, top_k: int, implementation: Implementation | None) -> bool:
    """Whether the kernel computes it, which reads no `RowMatrix`."""
    if isinstance(weight, RowMatrix):
        return False
    unsupported = pallas.unsupported(hidden, weight, tied=tied, top_k=top_k)
    return choose("best_tokens", implementation, unsupported) == "pallas"
