"""The LM head followed by a choice of its best tokens, as one op, dispatched to its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.dispatch import Implementation, choose
from dflash_jax.kernels.matmul import Layout


def best_tokens(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "rows columns"] | Compact,
    *,
    layout: Layout,
    top_k: int,
    multiplier: float = 1.0,
    softcap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*batch best"], Int[Array, "*batch best"]]:
    """The `top_k` tokens of largest logit and their logits, best first; of equal ones the lowest ids.

    Args:
      hidden: final hidden states, normalised.
      weight: the head.
      layout: of the head: "in_out" is [hidden, vocab], "out_in" is [vocab, hidden], as a tied embedding is.
      top_k: how many; 1 is the argmax.
      multiplier: scales the logits.
      softcap: caps them after that, to softcap * tanh(logits / softcap); None for no cap.
      implementation: overrides what the platform decides; see `kernels.dispatch`. "mosaic_gpu" writes no
        logits to memory.
    """
    compute = choose("best_tokens", implementation, hidden, weight, layout, top_k).compute
    return compute(hidden, weight, layout=layout, top_k=top_k, multiplier=multiplier, softcap=softcap)


def writes_logits(
    hidden: Float[Array, "*batch hidden"],
    weight: Float[Array, "rows columns"] | Compact,
    *,
    layout: Layout,
    implementation: Implementation | None = None,
) -> bool:
    """Whether the argmax by `best_tokens` writes all logits to memory, where others may as well use them."""
    return choose("best_tokens", implementation, hidden, weight, layout, 1).name != "mosaic_gpu"
