"""The draft's training forward: every anchor of a sequence in one pass.

Each block sees exactly what it would see in serving: the features of the positions before its anchor,
and itself. The parts are those of `dflash_jax.models.draft`; only the attention differs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.draft import context_entries, run_layers
from dflash_jax.models.layers import project_kv, project_q
from dflash_jax.models.weights import DraftParams
from dflash_jax.training.objective.attention import anchored_attention


def block_hidden(
    params: DraftParams,
    config: DraftConfig,
    embedding: Float[Array, "vocab hidden"],
    features: Float[Array, "sequences length features"],
    anchors: Int[Array, "sequences anchors"],
    anchor_tokens: Int[Array, "sequences anchors"],
) -> Float[Array, "sequences anchors block hidden"]:
    """Final hidden states of the blocks [anchor, MASK, ...] of every anchor, normalised.

    Args:
      params, config: the draft; its `block_size` is the width of the blocks.
      embedding: the target's, unscaled.
      features: the target's hidden states after `target_layer_ids`, concatenated, of whole sequences.
      anchors: position of each anchor, ascending within a sequence.
      anchor_tokens: the tokens there.
    """
    sequences, count = anchors.shape
    block = config.block_size
    length = features.shape[1]
    context = context_entries(params, config, features, jnp.broadcast_to(jnp.arange(length), (sequences, length)))

    masks = jnp.full((sequences, count, block - 1), config.mask_token_id, anchor_tokens.dtype)
    blocks = jnp.concatenate([anchor_tokens[..., None], masks], axis=-1).reshape(sequences * count, block)
    positions = (anchors[..., None] + jnp.arange(block)).reshape(sequences * count, block)
    x = (embedding[blocks] * config.input_embedding_scale).astype(embedding.dtype)

    def split(x):
        return x.reshape(sequences, count, *x.shape[1:])

    def attend(index, weights, layer, normed):
        k, v = project_kv(normed, positions, weights, config)
        return anchored_attention(
            split(project_q(normed, positions, weights, config)),
            split(k),
            split(v),
            context.k[index],
            context.v[index],
            anchors,
            causal=layer.causal,
            window=layer.window,
            scale=config.head_dim**-0.5,
        )

    return split(run_layers(params, config, x, attend))
