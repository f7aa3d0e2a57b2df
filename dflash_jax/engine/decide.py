"""From the target's hidden states to which drafted tokens stay and which token follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.engine.state import Models
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models.drafters import Proposal
from dflash_jax.models.lm_head import target_head
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
      implementation: of the kernels; see `kernels.dispatch`.
    """

    head = target_head(models.target)

    def from_logits() -> Verdict:
        logits = head.logits(hidden, implementation=implementation)
        return verify(logits, proposal.tokens, drafted, proposal.candidates, proposal.probs, sampler, position)

    def from_best() -> Verdict:
        with jax.named_scope("lm_head"):
            _, best = head.best(hidden, 1, implementation=implementation)
        return verify_greedy(best[..., 0], proposal.tokens, drafted)

    if head.writes_logits(hidden, implementation=implementation):
        return from_logits()
    return jax.lax.cond(jnp.any(sampler.temperature > 0), from_logits, from_best)
