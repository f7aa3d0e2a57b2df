"""The target's distribution after temperature, top-k, top-p and min-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32


class Sampler(struct.PyTreeNode):
    """How to sample, one entry per slot or per row.

    Attributes:
      temperature: 0 is greedy; the other fields then do nothing.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens that holds this much probability; 1 keeps all.
      min_p: keep tokens at least this likely, relative to the most likely one; 0 keeps all.
      seed: of the request's random draws.

    Any finite values in these ranges give a distribution, at the ends of float32's range too.
    """

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: UInt32[Array, " rows"]


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-30, 1e30
"""What float32 can divide scores by. Below the first a quotient overflows; above the second all of them are equal."""


def device_temperature(temperature: float) -> float:
    """What a request's temperature is in a `Sampler`: 0, or the nearest that float32 can divide by."""
    return min(max(temperature, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE) if temperature > 0 else 0.0


def _sortable(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Unsigned integers in the same order as the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _keep_best(
    values: Float[Array, "*batch vocab"], weights: Float[Array, "*batch vocab"], goal: Float[Array, "*batch"]
):
    """Mask of the smallest set of largest values whose weights add up to `goal`; ties are kept together.

    The largest value is always kept, also where the goal is so small that float32 takes it for 0. The threshold
    is found bit by bit, 32 passes over the vocabulary: exact like a sort and several times cheaper.
    """
    order = _sortable(values)

    def try_bit(index, threshold):
        higher = threshold | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        mass = jnp.where(order >= higher[..., None], weights, 0).sum(-1)
        return jnp.where(mass >= goal, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(goal.shape, jnp.uint32))
    return order >= jnp.minimum(threshold[..., None], order.max(-1, keepdims=True))


def target_probs(logits: Float[Array, "rows tokens vocab"], sampler: Sampler) -> Float[Array, "rows tokens vocab"]:
    """Probabilities to sample from: temperature, then top-k, top-p and min-p, renormalised.

    Rows of temperature 0 get the plain softmax; their tokens come from the argmax instead.
    """

    def column(per_row):
        return jnp.broadcast_to(per_row[:, None], logits.shape[:-1])

    temperature = jnp.clip(sampler.temperature, LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)
    temperature = jnp.where(sampler.temperature > 0, temperature, 1.0)
    logits = logits.astype(jnp.float32)
    # Differences first: what is then large is negative, and its probability is 0.
    scores = (logits - logits.max(-1, keepdims=True)) / temperature[:, None, None]

    # Best is by logits: where temperatures are extreme, scores and probabilities are equal that are not equally good.
    def keep_top_k(scores):
        count = column(jnp.where(sampler.top_k > 0, sampler.top_k, scores.shape[-1])).astype(jnp.float32)
        return jnp.where(_keep_best(logits, jnp.ones_like(scores), count), scores, -jnp.inf)

    def keep_top_p(probs):
        kept = _keep_best(logits, probs, column(sampler.top_p) * probs.sum(-1))
        return jnp.where(kept | (column(sampler.top_p) >= 1)[..., None], probs, 0)

    sampled = sampler.temperature > 0
    scores = jax.lax.cond(jnp.any(sampled & (sampler.top_k > 0)), keep_top_k, lambda x: x, scores)
    probs = jax.nn.softmax(scores, axis=-1)
    probs = jax.lax.cond(jnp.any(sampled & (sampler.top_p < 1)), keep_top_p, lambda x: x, probs)
    floor = column(sampler.min_p)[..., None] * probs.max(-1, keepdims=True)
    probs = jnp.where(probs >= floor, probs, 0)
    return probs / probs.sum(-1, keepdims=True)


def sample(weights: Float[Array, "rows vocab"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """Draws a token with probability proportional to its weight, by inverting the cumulative sum."""
    total = jnp.cumsum(weights, axis=-1)
    goal = uniform[:, None] * total[:, -1:]
    token = jnp.sum(total <= goal, axis=-1)
    # Rounding can put the goal at the very end, past the last token of positive weight.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.minimum(token, last).astype(jnp.int32)
