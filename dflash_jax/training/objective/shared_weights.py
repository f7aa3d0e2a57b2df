"""The weights that a draft shares with its target."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float

from dflash_jax.kernels.compact import widened
from dflash_jax.models.lm_head import target_head
from dflash_jax.models.weights import TargetParams
from dflash_jax.training.values import Dtype


@struct.dataclass
class SharedWeights:
    """The target's embedding and LM head, both with a row per token. The draft uses them and does not train them."""

    embedding: Float[Array, "vocab hidden"]
    head: Float[Array, "vocab hidden"]


def shared_weights(target: TargetParams, dtype: Dtype) -> SharedWeights:
    """The embedding, and the LM head in the dtype of training's matrix products."""
    return SharedWeights(widened(target.embedding), target_head(target).weight.out_in.astype(dtype))
