"""From a draft's best tokens to the drafted ones.

DFlash takes the best token at each position. DFlash 2 scores the edges between consecutive positions'
candidates and walks from the anchor.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.choice import Implementation
from dflash_jax.kernels.selector import select_path
from dflash_jax.models.weights import SelectorWeights


class Proposal(struct.PyTreeNode):
    """Drafted tokens with the distribution they were drawn from.

    `probs[r, l]` is q over `candidates[r, l]`; every other token has probability 0. A greedy proposal
    puts 1 on the drafted token.
    """

    tokens: Int[Array, "rows drafts"]
    candidates: Int[Array, "rows drafts candidates"]
    probs: Float[Array, "rows drafts candidates"]


def argmax_proposal(tokens: Int[Array, "rows drafts"]) -> Proposal:
    """DFlash's proposal: the best token of each position, q one-hot.

    It stays the argmax under sampling too: the positions are independent marginals, and drawing each
    one alone makes blocks that the target rejects.
    """
    return Proposal(tokens, tokens[..., None], jnp.ones((*tokens.shape, 1), jnp.float32))


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
    return Proposal(tokens, candidates, probs)
