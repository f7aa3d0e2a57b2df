"""Log-probabilities of tokens under the model's own distribution: before temperature, top-k, top-p and min-p."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.lm_head import best_of


class Logprobs(struct.PyTreeNode):
    """What the model gives some tokens, and which tokens it gives most. Of equal logits the lowest id is the best.

    Attributes:
      logprob: natural logarithm of each token's probability.
      rank: of each token among the vocabulary; 1 is the most likely.
      top_tokens, top_logprobs: the most likely tokens at each place, best first.
    """

    logprob: Float[Array, "*batch"]
    rank: Int[Array, "*batch"]
    top_tokens: Int[Array, "*batch top"]
    top_logprobs: Float[Array, "*batch top"]


def logprobs_of(logits: Float[Array, "*batch vocab"], tokens: Int[Array, "*batch"], top: int) -> Logprobs:
    """The log-softmax of logits at some tokens and at the `top` best ones.

    Args:
      logits: of the model, unchanged.
      tokens: one for each place.
      top: how many of the most likely tokens to name; 0 names none.
    """
    batch, vocab = logits.shape[:-1], logits.shape[-1]
    top = min(top, vocab)
    # With the places in one row, a place's sum is added up in the same order however many places there are.
    flat, wanted = logits.reshape(-1, vocab).astype(jnp.float32), tokens.reshape(-1, 1)
    best = flat.max(axis=-1, keepdims=True)
    rest = jnp.log(jnp.exp(flat - best).sum(axis=-1, keepdims=True))
    own = jnp.take_along_axis(flat, wanted, axis=-1)
    better = (flat > own) | ((flat == own) & (jnp.arange(vocab) < wanted))
    if top:
        values, names = best_of(flat, top)
    else:
        values, names = flat[:, :0], jnp.zeros((flat.shape[0], 0), jnp.int32)
    return Logprobs(
        logprob=(own - best - rest)[:, 0].reshape(batch),
        rank=(1 + better.sum(axis=-1, dtype=jnp.int32)).reshape(batch),
        top_tokens=names.reshape(*batch, top),
        top_logprobs=(values - best - rest).reshape(*batch, top),
    )
