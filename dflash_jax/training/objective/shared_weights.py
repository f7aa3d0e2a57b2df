"""The weights that a draft shares with its target."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float

from dflash_jax.models.weights import TargetParams
from dflash_jax.training.config import Dtype
from dflash_jax.training.objective.head import head_matrix


@struct.dataclass
class Vocabulary:
    """The target's ends, which the draft borrows: a row per token in both."""

    embedding: Float[Array, "vocab hidden"]
    head: Float[Array, "vocab hidden"]


def borrow(target: TargetParams, dtype: Dtype) -> Vocabulary:
    """The target's embedding and LM head; the head in the precision of training, since it is multiplied by."""
    return Vocabulary(target.embedding, head_matrix(target).astype(dtype))
