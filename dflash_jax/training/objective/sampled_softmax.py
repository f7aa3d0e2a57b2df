"""Which rows of the LM head a step's loss runs over.

Most of a vocabulary is rare, and the head is most of what a draft's step costs. The frequent tokens are
always there; of the rest a step draws some, each standing for several (sampled softmax, Bengio and
Senecal 2008, with the uniform proposal's correction).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, Key

from dflash_jax.training.objective.head import HeadRows


@struct.dataclass
class RowPlan:
    """A division of the tokens that a loss knows.

    Attributes:
      always: tokens in every step.
      rest: tokens of which each step draws `drawn`.
    """

    always: Int[Array, " always"]
    rest: Int[Array, " rest"]
    drawn: int = struct.field(pytree_node=False)


def plan_rows(counts: np.ndarray, *, unseen: bool, frequent: int | None, drawn: int) -> RowPlan:
    """Divides the vocabulary by how often tokens occur in the data.

    Args:
      counts: occurrences of each token, [vocab].
      unseen: whether tokens that do not occur take part.
      frequent: how many of the most frequent are in every step; None for all that take part.
      drawn: how many of the others a step draws; None of them when there are none.
    """
    order = np.argsort(-counts, kind="stable").astype(np.int32)
    known = order if unseen else order[counts[order] > 0]
    always, rest = (known, known[:0]) if frequent is None else (known[:frequent], known[frequent:])
    return RowPlan(jnp.asarray(np.sort(always)), jnp.asarray(np.sort(rest)), min(drawn, len(rest)))


def draw_rows(key: Key[Array, ""], plan: RowPlan) -> HeadRows:
    """The rows of one step."""
    always = jnp.zeros(plan.always.shape)
    if not plan.drawn:
        return HeadRows(plan.always, always)
    drawn = jax.random.choice(key, plan.rest, (plan.drawn,), replace=False)
    share = jnp.full((plan.drawn,), np.log(plan.rest.shape[0] / plan.drawn), jnp.float32)
    return HeadRows(jnp.concatenate([plan.always, drawn]), jnp.concatenate([always, share]))
