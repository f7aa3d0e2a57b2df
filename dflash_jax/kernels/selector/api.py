"""DFlash 2's selector as one op, dispatched to its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation, choose


def select_path(
    tokens: Int[Array, "rows drafts candidates"],
    unary: Float[Array, "rows drafts candidates"],
    gate: Float[Array, "rows drafts rank"],
    anchor: Int[Array, " rows"],
    predecessor_codebook: Float[Array, "vocab rank"],
    successor_codebook: Float[Array, "vocab rank"],
    temperature: Float[Array, " rows"],
    noise: Float[Array, "rows drafts candidates"] | None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "rows drafts"], Float[Array, "rows drafts candidates"]]:
    """Scores candidates after their predecessors and walks from the anchor, one position after the other.

    S_l(a, b) = unary_l(b) + <predecessor_codebook[a] * gate_l, successor_codebook[b]>, where a is the
    token chosen before: the anchor at l = 0 (`CandidateSelector`, dflash 0.1.0).

    Args:
      tokens: the candidates of each position.
      unary: their scores on their own.
      gate: the block's hidden states, projected to the codebooks' rank.
      anchor: last committed token of each row.
      predecessor_codebook, successor_codebook: a code per token, as predecessor and as successor.
      temperature: 0 takes the best edge; T > 0 samples from softmax(S / T).
      noise: standard Gumbel noise that makes the samples (argmax of S / T + noise); None when every
        temperature is 0.
      implementation: overrides what the platform decides; see `kernels.dispatch`.

    Returns:
      The chosen tokens, and at each position the distribution over its candidates that they were
      drawn from: softmax(S / T), or 1 on the best one. Of equal scores the first candidate wins.
    """
    compute = choose("select_path", implementation, tokens, gate, predecessor_codebook, successor_codebook).compute
    return compute(tokens, unary, gate, anchor, predecessor_codebook, successor_codebook, temperature, noise)
