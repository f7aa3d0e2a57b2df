"""From the target's hidden states to which drafted tokens stay and which token follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.engine.state import Models
from dflash_jax.kernels.choice import Implementation
from dflash_jax.kernels.lm_head import best_tokens, writes_logits
from dflash_jax.models.selector import Proposal
from dflash_jax.models.target import head, lm_head
from dflash_jax.sampling import Sampler, Verdict, verify, verify_greedy


def decide(
    models: Models,
    hidden: Float[Array, "rows block hidden"],
    proposal: Proposal,
    drafted: Int[Array, " rows"],
    sampler: Sampler,
    position: Int[Array, " rows"],
    implementation: Implementation | None = None,
) -> Verdict:
    """Each row's drafted tokens against the target's hidden states.

    Greedy rows need only the head's best tokens, for which its kernel writes no logits. If a row
    samples it needs all of them, and then the others use them too.

    Args:
      models: whose target has the head.
      hidden: the target's, after the anchor and after each drafted token.
      proposal, drafted, sampler, position: see `verify`; drafted counts the real ones.
      implementation: of the kernels; see `kernels.choice`.
    """

    def from_logits() -> Verdict:
        logits = lm_head(models.target, hidden)
        return verify(logits, proposal.tokens, drafted, proposal.candidates, proposal.probs, sampler, position)

    def from_best() -> Verdict:
        with jax.named_scope("lm_head"):
            _, best = best_tokens(hidden, **head(models.target), top_k=1, implementation=implementation)
        return verify_greedy(best[..., 0], proposal.tokens, drafted)

    if writes_logits(hidden, **head(models.target), implementation=implementation):
        return from_logits()
    return jax.lax.cond(jnp.any(sampler.temperature > 0), from_logits, from_best)
