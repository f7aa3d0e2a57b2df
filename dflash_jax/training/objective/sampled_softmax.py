"""Which tokens a step's softmax runs over.

Most of a vocabulary is rare, and the LM head is most of what a draft's step costs. The frequent tokens are in
every step; of the rare ones each step draws some, and each drawn one stands for several (sampled softmax,
Bengio and Senecal 2008, with the uniform proposal's correction).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Key


@struct.dataclass
class VocabularySubset:
    """The tokens that a softmax runs over.

    Attributes:
      tokens: the tokens, distinct.
      log_weight: logarithm of how many tokens each stands for: 0 for itself alone, more for one that was drawn
        from many.
    """

    tokens: Int[Array, " subset"]
    log_weight: Float[Array, " subset"]


@struct.dataclass
class SubsetPlan:
    """What each step's subset is made of.

    Attributes:
      frequent: tokens in every step.
      rare: tokens of which each step draws `drawn`.
    """

    frequent: Int[Array, " frequent"]
    rare: Int[Array, " rare"]
    drawn: int = struct.field(pytree_node=False)


def whole_vocabulary(vocab_size: int) -> VocabularySubset:
    """Every token, each for itself."""
    return VocabularySubset(jnp.arange(vocab_size, dtype=jnp.int32), jnp.zeros(vocab_size))


def plan_subset(
    token_counts: Int[np.ndarray, " vocab"], *, unseen: bool, frequent: int | None, drawn: int
) -> SubsetPlan:
    """Divides the vocabulary by how often tokens occur in the data.

    Args:
      token_counts: occurrences of each token.
      unseen: whether tokens that do not occur take part.
      frequent: how many of the most frequent are in every step; None for all that take part.
      drawn: how many of the others a step draws, at most.
    """
    order = np.argsort(-token_counts, kind="stable").astype(np.int32)
    known = order if unseen else order[token_counts[order] > 0]
    always, rare = (known, known[:0]) if frequent is None else (known[:frequent], known[frequent:])
    return SubsetPlan(jnp.asarray(np.sort(always)), jnp.asarray(np.sort(rare)), min(drawn, len(rare)))


def draw_subset(key: Key[Array, ""], plan: SubsetPlan) -> VocabularySubset:
    """The subset of one step."""
    log_weight = jnp.zeros(plan.frequent.shape)
    if not plan.drawn:
        return VocabularySubset(plan.frequent, log_weight)
    drawn = jax.random.choice(key, plan.rare, (plan.drawn,), replace=False)
    stands_for = jnp.full((plan.drawn,), np.log(plan.rare.shape[0] / plan.drawn), jnp.float32)
    return VocabularySubset(jnp.concatenate([plan.frequent, drawn]), jnp.concatenate([log_weight, stands_for]))
