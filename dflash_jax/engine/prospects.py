"""Which drafted tokens are worth verifying.

A round verifies so many tokens in all, and they go to the drafted tokens that are most likely to be kept, whichever
row they are in. How likely that is follows from how sure the draft was of each position: from the margin between its
two best scores there. The margin is known before anything is drawn, and nothing here looks at the tokens that were
drawn: a choice that did would change what a sampled request says.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EDGES = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Where one bin of margins ends and the next begins, in nats."""

NUM_BINS = len(EDGES) + 1


def bins_of(margin: Float[Array, "rows drafts"]) -> Int[Array, "rows drafts"]:
    """The bin of each margin; of one that is not a number the first."""
    return (margin[..., None] >= jnp.asarray(EDGES)).sum(-1).astype(jnp.int32)


def survival(bins: Int[Array, "rows drafts"], chance: Float[Array, "drafts bins"]) -> Float[Array, "rows drafts"]:
    """The chance that a drafted token is kept, with all before it.

    Args:
      bins: of the margins.
      chance: that a token is kept if those before it are, by position and bin.
    """
    return jnp.cumprod(chance[jnp.arange(bins.shape[1]), bins], axis=1)


def hand_out(
    survival: Float[Array, "rows drafts"], drafting: Bool[Array, " rows"], spare: Int[Array, ""]
) -> Int[Array, " rows"]:
    """How many drafted tokens of each row are verified: together the `spare` ones most likely to be kept.

    Args:
      survival: as `survival` returns it, not rising along a row.
      drafting: rows that have drafted tokens.
      spare: tokens to hand out.
    """
    rows, drafts = survival.shape
    wanted = jnp.where(drafting[:, None], survival, -1.0).reshape(-1)
    # Of equal ones the earlier: so a row's tokens are taken from its first on.
    rank = jnp.zeros(rows * drafts, jnp.int32).at[jnp.argsort(-wanted, stable=True)].set(jnp.arange(rows * drafts))
    taken = (rank < spare).reshape(rows, drafts) & drafting[:, None]
    return taken.sum(1)
