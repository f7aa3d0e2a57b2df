"""What a training step is given."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float, Int


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
