"""Features in units of their own size: what divides them, and drafts for features so divided and for raw ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

from dflash_jax.models.weights import DraftParams


def feature_scale(samples: list[Float[np.ndarray, "tokens features"]]) -> Float[np.ndarray, " features"]:
    """Each feature's standard deviation about zero.

    Features differ by a factor of a thousand, and one optimiser step moves every weight equally far: training
    runs on features divided by this, and `unscale_features` puts it into `fc` afterwards. First tokens are left
    out, whose hidden states many targets use as an attention sink and blow up.
    """
    together = np.concatenate([sample[1:].astype(np.float32) for sample in samples])
    return np.maximum(np.sqrt(np.mean(np.square(together), axis=0)), 1e-6).astype(np.float32)


def scale_features(params: DraftParams, scale: Float[Array, " features"]) -> DraftParams:
    """A draft for raw features as one for features divided by `scale`."""
    return params.replace(fc=params.fc * scale[:, None])


def unscale_features(params: DraftParams, scale: Float[Array, " features"]) -> DraftParams:
    """A draft for features divided by `scale` as one for raw features."""
    return params.replace(fc=params.fc / scale[:, None])
