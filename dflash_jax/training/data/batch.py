"""Sequences padded to one length."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.training.data.records import TokenSequence


@struct.dataclass
class TokenBatch:
    """Sequences, padded to one length.

    Attributes:
      tokens: anything past a sequence's end.
      prompt_lens: tokens at the start that the target did not write.
      seq_lens: tokens of each sequence.
    """

    tokens: Int[Array, "sequences length"]
    prompt_lens: Int[Array, " sequences"]
    seq_lens: Int[Array, " sequences"]


@struct.dataclass
class Batch(TokenBatch):
    """Sequences with the target's hidden states: what a draft is trained on.

    Attributes:
      features: hidden states after the draft's `target_layer_ids`, concatenated.
      final: final hidden states, normalised; None unless the target's distribution is learned from.
    """

    features: Float[Array, "sequences length features"]
    final: Float[Array, "sequences length hidden"] | None = None


def token_batch(sequences: Sequence[TokenSequence], length: int) -> TokenBatch:
    """Sequences of at most `length` tokens as a batch."""
    prompt_lens = np.asarray([sequence.prompt_len for sequence in sequences], np.int32)
    seq_lens = np.asarray([len(sequence.tokens) for sequence in sequences], np.int32)
    tokens = pad([sequence.tokens for sequence in sequences], length, np.dtype(np.int32))
    return TokenBatch(jnp.asarray(tokens), jnp.asarray(prompt_lens), jnp.asarray(seq_lens))


def pad(arrays: Sequence[np.ndarray], length: int, dtype: np.dtype) -> np.ndarray:
    """Arrays of different lengths in one, with zeros after each: [arrays, length, ...]."""
    padded = np.zeros((len(arrays), length, *arrays[0].shape[1:]), dtype)
    for index, array in enumerate(arrays):
        padded[index, : len(array)] = array
    return padded
