"""The target's hidden states over whole sequences: the features that a draft is conditioned on."""

from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.compact import is_compact, widened
from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.matrix import map_matrices
from dflash_jax.models.recurrent import init_recurrent
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
    layers, dtype = len(config.attention_layers), params.embedding.dtype
    nothing = jnp.zeros((layers, 1, 1, config.num_kv_heads, config.head_dim), dtype)
    context = Context(
        pages=KeyValues(nothing, nothing),
        block_table=jnp.full((sequences, 1), -1, jnp.int32),
        idx_mapping=jnp.arange(sequences, dtype=jnp.int32),
        lengths=jnp.zeros(sequences, jnp.int32),
    )
    q_len = jnp.full((sequences,), length, jnp.int32)
    return extend(
        params,
        config,
        context,
        tokens,
        q_len,
        recurrent=init_recurrent(config, sequences, dtype),
        prefill=True,
        feature_layers=feature_layers,
        implementation=implementation,
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
        """Hidden states after the layers, concatenated in their order; after the last layer, those after the norm."""
        # Padding at the end changes nothing before it: the target is causal.
        padded = np.pad(tokens, (0, -len(tokens) % _BUCKET))
        return np.asarray(_features(self._params, self._config, jnp.asarray(padded)[None], layers)[0])[: len(tokens)]


@functools.partial(jax.jit, static_argnums=(1, 3))
def _features(params, config, tokens, layers):
    # Layers after the last one asked for contribute nothing, and the compiler leaves them out.
    return run_sequences(params, config, tokens, layers).features


def fingerprint(params: TargetParams | DraftParams, config: TargetConfig | DraftConfig) -> str:
    """Hash of a model: its config and every weight."""
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
    laid_out = map_matrices(lambda matrix: matrix.laid_out("in_out"), params)
    for leaf in map(widened, jax.tree.leaves(laid_out, is_leaf=is_compact)):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.hexdigest()
