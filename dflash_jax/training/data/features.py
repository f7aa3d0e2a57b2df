"""The target's hidden states over whole sequences: the features that a draft is conditioned on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.choice import Implementation
from dflash_jax.models.cache import Context, KeyValues
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.target import Extension, extend
from dflash_jax.models.weights import DraftParams, TargetParams
from dflash_jax.training.precision import rounded
from dflash_jax.training.values import Dtype

_BUCKET = 128


def run_sequences(
    params: TargetParams,
    config: TargetConfig,
    tokens: Int[Array, "sequences length"],
    feature_layers: tuple[int, ...] = (),
    implementation: Implementation | None = None,
) -> Extension:
    """Runs the target over whole sequences: `extend` with nothing cached."""
    sequences, length = tokens.shape
    nothing = jnp.zeros((config.num_layers, 1, 1, config.num_kv_heads, config.head_dim), params.embedding.dtype)
    context = Context(
        pages=KeyValues(nothing, nothing),
        block_table=jnp.full((sequences, 1), -1, jnp.int32),
        idx_mapping=jnp.arange(sequences, dtype=jnp.int32),
        lengths=jnp.zeros(sequences, jnp.int32),
    )
    q_len = jnp.full((sequences,), length, jnp.int32)
    return extend(params, config, context, tokens, q_len, feature_layers=feature_layers, implementation=implementation)


def up_to_layer(params: TargetParams, config: TargetConfig, layer: int) -> tuple[TargetParams, TargetConfig]:
    """The target without the layers after `layer`, whose outputs are not needed."""
    return (
        params.replace(layers=params.layers[: layer + 1]),
        dataclasses.replace(config, layers=config.layers[: layer + 1]),
    )


class FeatureExtractor:
    """Computes features of single sequences.

    Args:
      params, config: the target.
      dtype: of the factors of its matrix products.
    """

    def __init__(self, params: TargetParams, config: TargetConfig, dtype: Dtype = "float32"):
        self._params, self._config = rounded(params, dtype), config

    def __call__(
        self, tokens: Int[np.ndarray, " tokens"], layers: tuple[int, ...]
    ) -> Float[np.ndarray, "tokens features"]:
        """Hidden states after the layers, concatenated in their order.

        If the last entry is the number of the target's layers, it means the final hidden states, normalised.
        """
        # Padding at the end changes nothing before it: the target is causal.
        padded = np.pad(tokens, (0, -len(tokens) % _BUCKET))
        params, config = up_to_layer(self._params, self._config, max(layers))
        return np.asarray(_features(params, config, jnp.asarray(padded)[None], layers)[0])[: len(tokens)]


@functools.partial(jax.jit, static_argnums=(1, 3))
def _features(params, config, tokens, layers):
    inner = tuple(layer for layer in layers if layer < config.num_layers)
    run = run_sequences(params, config, tokens, inner)
    return run.features if inner == layers else jnp.concatenate([run.features, run.hidden], axis=-1)


def fingerprint(params: TargetParams | DraftParams, config: TargetConfig | DraftConfig) -> str:
    """Hash of a model: its config and every weight."""
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.hexdigest()
