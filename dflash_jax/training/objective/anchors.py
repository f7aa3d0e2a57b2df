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
      positions: of the anchors.
      valid: False where a sequence has fewer possible anchors than were asked for.
    """

    positions: Int[Array, "sequences anchors"]
    valid: Bool[Array, "sequences anchors"]


def sample_anchors(
    key: Key[Array, ""],
    prompt_lens: Int[Array, " sequences"],
    seq_lens: Int[Array, " sequences"],
    max_length: int,
    num_anchors: int,
) -> Anchors:
    """Distinct anchors, drawn uniformly from the positions that decoding can have an anchor at.

    An anchor is the last committed token, and its successor is a token that the target wrote. So anchors
    range from the prompt's last token to the sequence's last but one.

    Args:
      key: random key.
      prompt_lens: tokens of each sequence that were given, not written by the target.
      seq_lens: tokens of each sequence.
      max_length: tokens that sequences are padded to.
      num_anchors: anchors per sequence.
    """
    positions = jnp.arange(max_length)
    first = jnp.maximum(prompt_lens - 1, 0)
    possible = (positions >= first[:, None]) & (positions + 1 < seq_lens[:, None])
    priority = jax.random.uniform(key, possible.shape) + possible
    _, chosen = jax.lax.top_k(priority, num_anchors)
    chosen = jnp.sort(chosen, axis=1).astype(jnp.int32)
    return Anchors(chosen, jnp.take_along_axis(possible, chosen, axis=1))


def block_labels(
    tokens: Int[Array, "sequences length"], seq_lens: Int[Array, " sequences"], anchors: Anchors, block_size: int
) -> tuple[Int[Array, "sequences anchors block"], Bool[Array, "sequences anchors drafts"]]:
    """The tokens of each anchor's block, and which of its drafted positions (all but the anchor) have a label.

    A drafted position has none past the end of its sequence, or where the anchor is not valid.
    """
    positions = anchors.positions[..., None] + jnp.arange(block_size)
    inside = positions < seq_lens[:, None, None]
    sequences = jnp.arange(tokens.shape[0])[:, None, None]
    blocks = tokens[sequences, jnp.minimum(positions, tokens.shape[1] - 1)]
    return blocks, (inside & anchors.valid[..., None])[..., 1:]
