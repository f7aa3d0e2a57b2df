"""From a draft's logits to the drafted tokens.

DFlash takes the argmax at each position. DFlash 2 scores the edges between consecutive positions'
candidates (`CandidateSelector`, dflash 0.1.0) and walks from the anchor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.models.weights import SelectorWeights


class Candidates(struct.PyTreeNode):
    """What may be drafted at each mask position, best unary score first.

    `edges[r, l, a, b]` is the score of candidate b at position l after predecessor a: at l = 0 every
    predecessor is the anchor, later a is candidate a of position l - 1.
    """

    tokens: Int[Array, "rows drafts candidates"]
    unary: Float[Array, "rows drafts candidates"]
    edges: Float[Array, "rows drafts predecessors candidates"]


class Proposal(struct.PyTreeNode):
    """Drafted tokens with the distribution they were drawn from.

    `probs[r, l]` is q over `candidates[r, l]`; every other token has probability 0. A greedy proposal
    puts 1 on the drafted token.
    """

    tokens: Int[Array, "rows drafts"]
    candidates: Int[Array, "rows drafts candidates"]
    probs: Float[Array, "rows drafts candidates"]


def propose_argmax(logits: Float[Array, "rows drafts vocab"]) -> Proposal:
    """DFlash's proposal: the best token of each position, q one-hot.

    It stays the argmax under sampling too: the positions are independent marginals, and drawing each
    one alone makes blocks that the target rejects.
    """
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return Proposal(tokens, tokens[..., None], jnp.ones((*tokens.shape, 1), jnp.float32))


def score_candidates(
    weights: SelectorWeights,
    hidden: Float[Array, "rows drafts hidden"],
    logits: Float[Array, "rows drafts vocab"],
    anchor: Int[Array, " rows"],
    top_k: int,
) -> Candidates:
    """The best tokens of each position and all edges between them, in one pass.

    S_l(a, b) = unary_l(b) + <predecessor_codebook[a] * hidden_projection(h_l), successor_codebook[b]>.
    """
    unary, tokens = jax.lax.top_k(logits, top_k)
    anchors = jnp.broadcast_to(anchor[:, None, None], (tokens.shape[0], 1, top_k))
    predecessors = jnp.concatenate([anchors.astype(tokens.dtype), tokens[:, :-1]], axis=1)
    gate = hidden @ weights.hidden_projection
    edges = jnp.einsum(
        "rlae,rlbe->rlab",
        weights.predecessor_codebook[predecessors] * gate[:, :, None, :],
        weights.successor_codebook[tokens],
        preferred_element_type=jnp.float32,
    )
    return Candidates(tokens.astype(jnp.int32), unary, edges + unary[:, :, None, :])


def walk(
    candidates: Candidates,
    temperature: Float[Array, " rows"],
    noise: Float[Array, "rows drafts candidates"] | None,
) -> Proposal:
    """Chooses a path from the anchor through the candidates, one position after the other.

    Args:
      candidates: the scored edges.
      temperature: 0 takes the best edge; T > 0 samples from softmax(S / T), which is then q.
      noise: standard Gumbel noise that makes the samples (argmax of S / T + noise); None when every
        temperature is 0.
    """
    rows, drafts, top_k = candidates.tokens.shape
    index = jnp.zeros((rows,), jnp.int32)
    every_row = jnp.arange(rows)
    sampled = (temperature > 0)[:, None]
    divisor = jnp.where(sampled, temperature[:, None], 1.0)
    tokens, probs = [], []
    for position in range(drafts):
        scores = candidates.edges[every_row, position, index] / divisor
        drawn = scores if noise is None else jnp.where(sampled, scores + noise[:, position], scores)
        index = jnp.argmax(drawn, axis=-1).astype(jnp.int32)
        certain = jax.nn.one_hot(index, top_k, dtype=jnp.float32)
        probs.append(certain if noise is None else jnp.where(sampled, jax.nn.softmax(scores, axis=-1), certain))
        tokens.append(candidates.tokens[every_row, position, index])
    return Proposal(jnp.stack(tokens, axis=1), candidates.tokens, jnp.stack(probs, axis=1))
