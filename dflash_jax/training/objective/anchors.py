"""Which positions of a sequence to train on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Key


@struct.dataclass
class Anchors:
    """Anchors of some sequences, ascending within each.

    Attributes:
      positions: where the anchors stand.
      valid: False where a sequence has fewer places for an anchor than were asked for.
    """

    positions: Int[Array, "sequences anchors"]
    valid: Bool[Array, "sequences anchors"]


def sample_anchors(
    key: Key[Array, ""],
    prompt_lens: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    max_length: int,
    count: int,
) -> Anchors:
    """Distinct anchors, uniform over the places where decoding can put one.

    An anchor is the last committed token and its successor is one the target wrote: from the prompt's
    last token to the sequence's last but one.

    Args:
      key: random key.
      prompt_lens: tokens of each sequence that were given, not written by the target.
      lengths: tokens of each sequence.
      max_length: tokens that sequences are padded to.
      count: anchors per sequence.
    """
    positions = jnp.arange(max_length)
    first = jnp.maximum(prompt_lens - 1, 0)
    possible = (positions >= first[:, None]) & (positions + 1 < lengths[:, None])
    priority = jax.random.uniform(key, possible.shape) + possible
    _, chosen = jax.lax.top_k(priority, count)
    chosen = jnp.sort(chosen, axis=1).astype(jnp.int32)
    return Anchors(chosen, jnp.take_along_axis(possible, chosen, axis=1))


def block_labels(
    tokens: Int[Array, "sequences length"], lengths: Int[Array, " sequences"], anchors: Anchors, block_size: int
) -> tuple[Int[Array, "sequences anchors block"], Bool[Array, "sequences anchors drafts"]]:
    """The tokens of each anchor's block, and which of the drafted ones (all but the anchor) exist."""
    places = anchors.positions[..., None] + jnp.arange(block_size)
    inside = places < lengths[:, None, None]
    rows = jnp.arange(tokens.shape[0])[:, None, None]
    blocks = tokens[rows, jnp.minimum(places, tokens.shape[1] - 1)]
    return blocks, (inside & anchors.valid[..., None])[..., 1:]
