"""What a training step is given."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.models.weights import TargetParams
from dflash_jax.training.config import Dtype
from dflash_jax.training.head import head_matrix


@struct.dataclass
class Batch:
    """Sequences, padded to one length, with the target's features.

    Attributes:
      tokens: anything past a sequence's end.
      prompt_lens: tokens at the start that the target did not write.
      lengths: tokens of each sequence.
      features: the target's hidden states after the layers the draft listens to, concatenated.
      final: its final hidden states, normalised; None unless its distribution is asked for.
    """

    tokens: Int[Array, "sequences length"]
    prompt_lens: Int[Array, " sequences"]
    lengths: Int[Array, " sequences"]
    features: Float[Array, "sequences length features"]
    final: Float[Array, "sequences length hidden"] | None = None


@struct.dataclass
class Vocabulary:
    """The target's ends, which the draft borrows: a row per token in both."""

    embedding: Float[Array, "vocab hidden"]
    head: Float[Array, "vocab hidden"]


def borrow(target: TargetParams, dtype: Dtype) -> Vocabulary:
    """The target's embedding and LM head; the head in the precision of training, since it is multiplied by."""
    return Vocabulary(target.embedding, head_matrix(target).astype(dtype))
