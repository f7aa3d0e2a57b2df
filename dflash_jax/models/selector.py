"""From a draft's best tokens to the drafted ones.

DFlash takes the best token at each position. DFlash 2 scores the edges between consecutive positions'
candidates and walks from the anchor.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.kernels.choice import Implementation
from dflash_jax.kernels.selector import select_path
from dflash_jax.models.weights import SelectorWeights


class Proposal(struct.PyTreeNode):
    """Drafted tokens with the distribution they were drawn from.

    `probs[r, l]` is q over `candidates[r, l]`; every other token has probability 0. A greedy proposal
    puts 1 on the drafted token. `damaged[r]`: scores of the row were not finite; its tokens are then any, and q
    puts 1 on each, which costs acceptance and leaves the output what it is.
    """

    tokens: Int[Array, "rows drafts"]
    candidates: Int[Array, "rows drafts candidates"]
    probs: Float[Array, "rows drafts candidates"]
    damaged: Bool[Array, " rows"]


def whole_proposal(
    tokens: Int[Array, "rows drafts"],
    candidates: Int[Array, "rows drafts candidates"],
    probs: Float[Array, "rows drafts candidates"],
    scores: Float[Array, "rows drafts candidates"],
    vocab_size: int,
) -> Proposal:
    """A proposal that can be verified whatever the draft's scores were; those that are not finite damage it."""
    damaged = ~jnp.all(jnp.isfinite(scores) & jnp.isfinite(probs), axis=(1, 2))
    at = damaged[:, None]
    tokens = jnp.where(at, jnp.clip(tokens, 0, vocab_size - 1), tokens)
    one_hot = jnp.arange(candidates.shape[-1]) == 0
    return Proposal(
        tokens,
        jnp.where(at[..., None], tokens[..., None], candidates),
        jnp.where(at[..., None], one_hot.astype(probs.dtype), probs),
        damaged,
    )


def argmax_proposal(
    tokens: Int[Array, "rows drafts"], logits: Float[Array, "rows drafts"], vocab_size: int
) -> Proposal:
    """DFlash's proposal: the best token of each position, q one-hot.

    It stays the argmax under sampling too: the positions are independent marginals, and drawing each
    one alone makes blocks that the target rejects.
    """
    certain = jnp.ones((*tokens.shape, 1), jnp.float32)
    return whole_proposal(tokens, tokens[..., None], certain, logits[..., None], vocab_size)


def select(
    weights: SelectorWeights,
    hidden: Float[Array, "rows drafts hidden"],
    candidates: Int[Array, "rows drafts candidates"],
    unary: Float[Array, "rows drafts candidates"],
    anchor: Int[Array, " rows"],
    temperature: Float[Array, " rows"],
    noise: Float[Array, "rows drafts candidates"] | None,
    *,
    implementation: Implementation | None = None,
) -> Proposal:
    """DFlash 2's proposal: a path from the anchor through the candidates; arguments as of `select_path`."""
    tokens, probs = select_path(
        candidates,
        unary,
        hidden @ weights.hidden_projection,
        anchor,
        weights.predecessor_codebook,
        weights.successor_codebook,
        temperature,
        noise,
        implementation=implementation,
    )
    vocab_size = weights.predecessor_codebook.shape[0]
    return whole_proposal(tokens, candidates, probs, unary, vocab_size)
