"""The scale of features: training divides features by it, and exported drafts have the division in their weights."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.matrix import Matrix
from dflash_jax.models.weights import DraftParams


def num_features(config: DraftConfig) -> int:
    """How many numbers a draft reads at each position: the hidden states after its `target_layer_ids`."""
    return config.hidden_size * len(config.target_layer_ids)


def feature_scale(samples: list[Float[np.ndarray, "tokens features"]]) -> Float[np.ndarray, " features"]:
    """Each feature's root mean square.

    Features differ by a factor of a thousand, and one optimiser step moves every weight equally far. So training
    runs on features divided by this scale, and `unscale_features` puts it into `fc` afterwards. First tokens are
    left out, because many targets use them as an attention sink, with huge hidden states.
    """
    together = np.concatenate([sample[1:].astype(np.float32) for sample in samples])
    return np.maximum(np.sqrt(np.mean(np.square(together), axis=0)), 1e-6).astype(np.float32)


def scale_features(params: DraftParams, scale: Float[Array, " features"]) -> DraftParams:
    """A draft for raw features, as one for features divided by `scale`."""
    return params.replace(fc=Matrix(params.fc.in_out * scale[:, None]))


def unscale_features(params: DraftParams, scale: Float[Array, " features"]) -> DraftParams:
    """A draft for features divided by `scale`, as one for raw features."""
    return params.replace(fc=Matrix(params.fc.in_out / scale[:, None]))
