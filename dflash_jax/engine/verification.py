"""From the target's hidden states to which drafted tokens stay and which token follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.engine.state import Models
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.packing import Packing, unpack
from dflash_jax.models.drafters import Proposal
from dflash_jax.models.lm_head import target_head
from dflash_jax.sampling import Sampler, Verdict, verify, verify_greedy


def verify_hidden(
    models: Models,
    hidden: Float[Array, "*tokens hidden"],
    proposal: Proposal,
    num_drafts: Int[Array, " rows"],
    sampler: Sampler,
    position: Int[Array, " rows"],
    implementation: Implementation | None = None,
    *,
    packing: Packing | None = None,
    written: Float[Array, "*tokens vocab"] | None = None,
) -> Verdict:
    """Each row's drafted tokens against the target's hidden states.

    Greedy rows need only the head's best tokens, for which its kernel writes no logits. If a row
    samples it needs all of them, and then the others use them too.

    Args:
      models: whose target has the head.
      hidden: the target's, after the anchor and after each drafted token.
      proposal, num_drafts, sampler, position: see `verify`.
      implementation: of the kernels; see `kernels.dispatch`.
      packing: of hidden states that are packed.
      written: the head's logits, where something else needs them too.

    Returns:
      What to keep. Logits that are not finite decide nothing: the verdict ends before the first of them,
      and is not `finite` if there is nothing before it.
    """

    head = target_head(models.target)

    def from_logits() -> tuple[Verdict, Bool[Array, "rows block"]]:
        logits = head.logits(hidden, implementation=implementation) if written is None else written
        logits = unpack(logits, packing)
        verdict = verify(logits, proposal.tokens, num_drafts, proposal.candidates, proposal.probs, sampler, position)
        # Of logits with a NaN among them, the largest is NaN.
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        return verdict, jnp.isfinite(jnp.take_along_axis(logits, best, axis=-1)[..., 0])

    def from_best() -> tuple[Verdict, Bool[Array, "rows block"]]:
        with jax.named_scope("lm_head"):
            value, best = (unpack(x, packing) for x in head.best(hidden, 1, implementation=implementation))
        return verify_greedy(best[..., 0], proposal.tokens, num_drafts), jnp.isfinite(value[..., 0])

    if written is not None or head.writes_logits(hidden, implementation=implementation):
        verdict, finite = from_logits()
    else:
        verdict, finite = jax.lax.cond(jnp.any(sampler.temperature > 0), from_logits, from_best)
    # A kernel that keeps a running maximum passes over NaN, but hidden states with one give nothing else.
    finite &= unpack(jnp.all(jnp.isfinite(hidden), axis=-1), packing)
    none = finite.shape[1]
    return _up_to_damage(verdict, proposal, jnp.where(finite.all(axis=1), none, jnp.argmin(finite, axis=1)))


def _up_to_damage(verdict: Verdict, proposal: Proposal, damaged: Int[Array, " rows"]) -> Verdict:
    """The verdict without what follows from logits at the block's position `damaged`.

    The drafted tokens before it are kept, the last of them in the place of the target's own token. The
    next round then begins at the damage, as plain decoding does, and nothing is left to keep.
    """
    reached = damaged <= verdict.accepted
    accepted = jnp.where(reached, jnp.maximum(damaged - 1, 0), verdict.accepted)
    next_token = verdict.next_token
    if proposal.tokens.shape[1]:
        last_kept = jnp.take_along_axis(proposal.tokens, accepted[:, None], axis=1, mode="clip")[:, 0]
        next_token = jnp.where(reached, last_kept, next_token)
    return Verdict(accepted, next_token, verdict.finite & ~(reached & (damaged == 0)))
