"""The body of a draft: one pass over a block of masks, conditioned on the target's hidden states.

`context_entries` turns the features of committed tokens into keys and values for the draft's pages; `run_block` runs
[anchor, MASK, ...] against them. The algorithm is arXiv 2602.06036 (DFlash) with DFlash 2's convolution. How tokens
come from the block's hidden states is the business of `models.drafters`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.compact import Compact
from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.models.config import ConvConfig, DraftConfig, LayerConfig
from dflash_jax.models.layers import linear, mlp, norm, project_kv, project_q
from dflash_jax.models.weights import AttentionWeights, ConvWeights, DraftParams, LayerWeights, MlpWeights


def context_entries(
    params: DraftParams,
    config: DraftConfig,
    features: Float[Array, "rows tokens features"],
    positions: Int[Array, "rows tokens"],
) -> KeyValues:
    """Keys and values of committed tokens, for the draft's pages.

    Args:
      features: the target's hidden states after `target_layer_ids`, concatenated.
      positions: absolute position of each token.
    """
    with jax.named_scope("context_features"):
        context = norm(features @ params.fc, params.hidden_norm, config)
        pairs = [project_kv(context, positions, _attention(layer), config) for layer in params.layers]
    return KeyValues(k=jnp.stack([k for k, _ in pairs]), v=jnp.stack([v for _, v in pairs]))


def convolve(
    x: Float[Array, "rows block hidden"],
    base: Float[Array, "taps hidden"],
    delta: Float[Array, "rows block taps groups"],
    group_size: int,
) -> Float[Array, "rows block hidden"]:
    """out[i, c] = sum_t (base[t, c] + delta[i, t, group(c)]) * x[i - t, c], with x[negative] = 0."""
    out = jnp.zeros_like(x)
    for tap in range(base.shape[0]):
        shifted = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
        out = out + (base[tap] + jnp.repeat(delta[:, :, tap], group_size, axis=-1)) * shifted
    return out


def conv_deltas(
    normed: Float[Array, "rows block hidden"], weights: ConvWeights, config: ConvConfig
) -> Float[Array, "rows block 2 taps groups"]:
    """Both sides' kernel deltas, from one projection of the sublayer's normalised input."""
    groups = normed.shape[-1] // config.group_size
    return (normed @ weights.kernel_projection).reshape(*normed.shape[:2], 2, config.taps, groups)


def run_block(
    params: DraftParams,
    config: DraftConfig,
    embedding: Float[Array, "vocab hidden"] | Compact,
    context: Context,
    anchor: Int[Array, " rows"],
    drafts: int,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "rows block hidden"]:
    """Final hidden states of the block [anchor, MASK * drafts], normalised.

    The block stands at positions p .. p + drafts of each row, p being its context's length. Its own
    keys and values stay out of the pages.

    Args:
      embedding: the target's, unscaled.
      context: the draft's pages; every row's holds exactly the tokens before its anchor.
      anchor: last committed token of each row.
      drafts: tokens to draft.
    """
    rows = anchor.shape[0]
    masks = jnp.full((rows, drafts), config.mask_token_id, anchor.dtype)
    x = embedding[jnp.concatenate([anchor[:, None], masks], axis=1)] * config.input_embedding_scale
    x = x.astype(embedding.dtype)
    positions = context.row_lengths()[:, None] + jnp.arange(1 + drafts)
    q_len = jnp.full((rows,), 1 + drafts, jnp.int32)

    def attend(index, weights, layer, normed):
        q = project_q(normed, positions, weights, config)
        k, v = project_kv(normed, positions, weights, config)
        return context.attend(
            index,
            q,
            k,
            v,
            q_len,
            causal=layer.causal,
            window=layer.window,
            scale=config.head_dim**-0.5,
            implementation=implementation,
        )

    return run_layers(params, config, x, attend)


Attend = Callable[[int, AttentionWeights, LayerConfig, Array], Array]
"""(layer index, attention weights, layer config, normalised block) -> mixed values, before the output projection."""


def run_layers(
    params: DraftParams, config: DraftConfig, x: Float[Array, "rows block hidden"], attend: Attend
) -> Float[Array, "rows block hidden"]:
    """The draft's layers and its final norm: one body for serving and training, which differ in `attend`."""
    for index, (weights, layer) in enumerate(zip(params.layers, config.layers, strict=True)):

        def attention(normed, index=index, weights=weights, layer=layer):
            mixed = attend(index, _attention(weights), layer, normed)
            return linear(mixed.reshape(*normed.shape[:2], -1), _attention(weights).o_proj)

        with jax.named_scope("draft_attention"):
            normed = norm(x, weights.input_norm, config)
            x = x + _convolved(attention, normed, weights.attention_conv, config)
        with jax.named_scope("draft_mlp"):
            assert isinstance(weights.mlp, MlpWeights)
            dense = weights.mlp
            normed = norm(x, weights.post_attention_norm, config)
            x = x + _convolved(lambda h, dense=dense: mlp(h, dense), normed, weights.mlp_conv, config)
    return norm(x, params.norm, config)


def _attention(weights: LayerWeights) -> AttentionWeights:
    """A draft's layers are all of attention."""
    assert isinstance(weights.attention, AttentionWeights)
    return weights.attention


def _convolved(sublayer, normed, weights: ConvWeights | None, config: DraftConfig):
    """A sublayer between its two convolutions, or bare when the model has none."""
    if weights is None or config.conv is None:
        return sublayer(normed)
    deltas = conv_deltas(normed, weights, config.conv)
    size = config.conv.group_size
    inner = sublayer(convolve(normed, weights.base_kernel[0], deltas[:, :, 0], size))
    return convolve(inner, weights.base_kernel[1], deltas[:, :, 1], size)
