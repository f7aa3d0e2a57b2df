"""Acceptance: which drafted tokens the target keeps, and the token it adds of its own.

Greedy rows keep the longest prefix equal to the target's argmax. Sampled rows use rejection sampling
with residual (arXiv 2211.17192), so that the output follows the target's distribution exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.sampling.distribution import Sampler, sample, target_probs
from dflash_jax.sampling.keys import Purpose, uniform


class Verdict(struct.PyTreeNode):
    """How many drafted tokens each row keeps, and the target's next token.

    Attributes:
      accepted: drafted tokens that stay.
      next_token: the token after them.
      finite: the logits it was computed from are finite; otherwise the verdict is meaningless.
      allowed: the same of what logits processors made of them: not every token is forbidden. None without processors.
    """

    accepted: Int[Array, " rows"]
    next_token: Int[Array, " rows"]
    finite: Bool[Array, " rows"]
    allowed: Bool[Array, " rows"] | None = None


def verify_greedy(
    best: Int[Array, "rows block"], drafts: Int[Array, "rows drafts"], num_drafts: Int[Array, " rows"]
) -> Verdict:
    """The longest prefix of the drafted tokens that equals the target's best ones, and the best one after it.

    Args:
      best: the target's tokens of largest logit, after the anchor and after each drafted token.
      drafts, num_drafts: see `verify`.

    Returns:
      The verdict, `finite` throughout: whether the best tokens come from finite logits is not known here.
    """
    accepted = _kept(drafts == best[:, :-1], num_drafts)
    next_token = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, next_token, jnp.ones_like(accepted, bool))


def _kept(keep: Bool[Array, "rows drafts"], num_drafts: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Length of the prefix of real drafted tokens that are all to be kept."""
    real = jnp.arange(keep.shape[1]) < num_drafts[:, None]
    return jnp.cumprod((keep & real).astype(jnp.int32), axis=1).sum(1)


def verify(
    logits: Float[Array, "rows block vocab"],
    drafts: Int[Array, "rows drafts"],
    num_drafts: Int[Array, " rows"],
    candidates: Int[Array, "rows drafts candidates"],
    candidate_probs: Float[Array, "rows drafts candidates"],
    sampler: Sampler,
    position: Int[Array, " rows"],
) -> Verdict:
    """Decides each row's drafted tokens.

    Args:
      logits: the target's, after the anchor and after each drafted token.
      drafts: drafted tokens; block - 1 of them, which is 0 when decoding plainly.
      num_drafts: how many of them are real, per row.
      candidates, candidate_probs: the proposal distribution q at each drafted position.
      sampler: per row.
      position: absolute position of the anchor; drafted token i would stand at position + 1 + i.
    """
    width = drafts.shape[1]
    greedy = verify_greedy(jnp.argmax(logits, axis=-1).astype(jnp.int32), drafts, num_drafts)

    def sampled(_):
        p = target_probs(logits, sampler)
        tokens_at = position[:, None] + 1 + jnp.arange(width)
        p_drafted = jnp.take_along_axis(p[:, :width], drafts[..., None], axis=-1)[..., 0]
        q_drafted = jnp.where(candidates == drafts[..., None], candidate_probs, 0).sum(-1)
        draw = uniform(sampler.seed, tokens_at, Purpose.ACCEPT)
        accepted = _kept(draw * q_drafted < p_drafted, num_drafts)

        rows = jnp.arange(p.shape[0])
        p_next = p[rows, accepted]
        residual = p_next
        if width:
            rejected = accepted < num_drafts
            at = jnp.minimum(accepted, width - 1)
            q = jnp.where(rejected[:, None], candidate_probs[rows, at], 0)
            residual = jnp.maximum(p_next.at[rows[:, None], candidates[rows, at]].add(-q), 0)
        weights = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p_next)
        draw = uniform(sampler.seed, (position + 1 + accepted)[:, None], Purpose.TARGET)[:, 0]
        hot = sampler.temperature > 0
        return Verdict(
            jnp.where(hot, accepted, greedy.accepted),
            jnp.where(hot, sample(weights, draw), greedy.next_token),
            greedy.finite,
        )

    return jax.lax.cond(jnp.any(sampler.temperature > 0), sampled, lambda _: greedy, None)
