"""From the target's hidden states to which drafted tokens stay and which token follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.engine.invariants import Violation
from dflash_jax.engine.processors import Process
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
    process: Process | None = None,
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
      process: what logits processors do to the target's logits.

    Returns:
      What to keep. Logits that are not finite, or forbid every token, decide nothing: the verdict ends before the
      first of them, and if there is nothing before it, it is not `finite` or not `allowed`.
    """

    head = target_head(models.target)

    def from_logits() -> tuple[Verdict, Bool[Array, "rows block"]]:
        logits = all_logits()
        return of_logits(logits), is_finite(logits)

    def all_logits() -> Float[Array, "rows block vocab"]:
        return unpack(head.logits(hidden, implementation=implementation) if written is None else written, packing)

    def of_logits(logits) -> Verdict:
        return verify(logits, proposal.tokens, num_drafts, proposal.candidates, proposal.probs, sampler, position)

    def is_finite(logits) -> Bool[Array, "rows block"]:
        # Of logits with a NaN among them, the largest is NaN.
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        return jnp.isfinite(jnp.take_along_axis(logits, best, axis=-1)[..., 0])

    def from_best() -> tuple[Verdict, Bool[Array, "rows block"]]:
        with jax.named_scope("lm_head"):
            value, best = (unpack(x, packing) for x in head.best(hidden, 1, implementation=implementation))
        return verify_greedy(best[..., 0], proposal.tokens, num_drafts), jnp.isfinite(value[..., 0])

    allowed = None
    if process is not None:
        logits = all_logits()
        processed = process(logits)
        verdict, finite, allowed = of_logits(processed), is_finite(logits), jnp.any(processed > -jnp.inf, axis=-1)
    elif written is not None or head.writes_logits(hidden, implementation=implementation):
        verdict, finite = from_logits()
    else:
        verdict, finite = jax.lax.cond(jnp.any(sampler.temperature > 0), from_logits, from_best)
    # A kernel that keeps a running maximum passes over NaN, but hidden states with one give nothing else.
    finite &= unpack(jnp.all(jnp.isfinite(hidden), axis=-1), packing)
    verdict = _up_to(verdict, proposal, finite)
    if allowed is None:
        return verdict
    # Where they are not finite, nothing is said about what they allow.
    restricted = _up_to(verdict.replace(finite=jnp.ones_like(verdict.finite)), proposal, allowed | ~finite)
    return restricted.replace(finite=verdict.finite, allowed=restricted.finite)


def undecided(verdict: Verdict) -> Int[Array, " rows"]:
    """The `Violation` because of which a verdict says nothing; 0 where it does."""
    violation = jnp.where(verdict.finite, 0, int(Violation.finite_logits))
    if verdict.allowed is None:
        return violation
    return jnp.where(verdict.finite & ~verdict.allowed, int(Violation.token_allowed), violation)


def _up_to(verdict: Verdict, proposal: Proposal, usable: Bool[Array, "rows block"]) -> Verdict:
    """The verdict without what follows from logits that are not usable.

    The drafted tokens before them are kept, the last of them in the place of the target's own token. The
    next round then begins there, as plain decoding does, and nothing is left to keep.
    """
    damaged = jnp.where(usable.all(axis=1), usable.shape[1], jnp.argmin(usable, axis=1))
    reached = damaged <= verdict.accepted
    accepted = jnp.where(reached, jnp.maximum(damaged - 1, 0), verdict.accepted)
    next_token = verdict.next_token
    if proposal.tokens.shape[1]:
        last_kept = jnp.take_along_axis(proposal.tokens, accepted[:, None], axis=1, mode="clip")[:, 0]
        next_token = jnp.where(reached, last_kept, next_token)
    return Verdict(accepted, next_token, verdict.finite & ~(reached & (damaged == 0)))
