"""The draft: one pass over a block of masks, conditioned on the target's hidden states.

Two entry points, as the engine needs them. `context_entries` turns the features of committed tokens
into keys and values for the draft's pages; `run_block` runs [anchor, MASK, ...] against them. The
algorithm is arXiv 2602.06036 (DFlash) with DFlash 2's convolution and selector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.block_attention import block_attention
from dflash_jax.kernels.choice import Implementation
from dflash_jax.kernels.lm_head import best_tokens
from dflash_jax.kernels.product import RowMatrix
from dflash_jax.models.cache import Context, KeyValues
from dflash_jax.models.config import ConvConfig, DraftConfig, LayerConfig
from dflash_jax.models.layers import linear, mlp, project_kv, project_q, rms_norm
from dflash_jax.models.selector import Proposal, argmax_proposal, select
from dflash_jax.models.target import head
from dflash_jax.models.weights import AttentionWeights, ConvWeights, DraftParams, MlpWeights, TargetParams


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
        context = rms_norm(features @ params.fc, params.hidden_norm, config.rms_norm_eps)
        pairs = [project_kv(context, positions, layer.attention, config) for layer in params.layers]
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
    embedding: Float[Array, "vocab hidden"],
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
        return block_attention(
            q,
            k,
            v,
            context.pages.k,
            context.pages.v,
            context.block_table,
            context.idx_mapping,
            context.lengths,
            q_len,
            layer=index,
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
            mixed = attend(index, weights.attention, layer, normed)
            return linear(mixed.reshape(*normed.shape[:2], -1), weights.attention.o_proj)

        with jax.named_scope("draft_attention"):
            normed = rms_norm(x, weights.input_norm, config.rms_norm_eps)
            x = x + _convolved(attention, normed, weights.attention_conv, config)
        with jax.named_scope("draft_mlp"):
            assert isinstance(weights.mlp, MlpWeights)
            dense = weights.mlp
            normed = rms_norm(x, weights.post_attention_norm, config.rms_norm_eps)
            x = x + _convolved(lambda h, dense=dense: mlp(h, dense), normed, weights.mlp_conv, config)
    return rms_norm(x, params.norm, config.rms_norm_eps)


def _convolved(sublayer, normed, weights: ConvWeights | None, config: DraftConfig):
    """A sublayer between its two convolutions, or bare when the model has none."""
    if weights is None or config.conv is None:
        return sublayer(normed)
    deltas = conv_deltas(normed, weights, config.conv)
    size = config.conv.group_size
    inner = sublayer(convolve(normed, weights.base_kernel[0], deltas[:, :, 0], size))
    return convolve(inner, weights.base_kernel[1], deltas[:, :, 1], size)


class Shortlist(struct.PyTreeNode):
    """The tokens that a draft proposes from, when not from all: most of a vocabulary is rare, and its LM head large.

    Attributes:
      tokens: their ids, ascending, so that of equal logits the lowest id still is the best.
      head: their columns of the target's LM head.
    """

    tokens: Int[Array, " listed"]
    head: Float[Array, "hidden listed"]


def make_shortlist(target: TargetParams, tokens: Sequence[int]) -> Shortlist:
    """The shortlist of some token ids; the LM head's columns are copied."""
    ids = jnp.asarray(sorted(set(tokens)), jnp.int32)
    if target.lm_head is None:
        return Shortlist(ids, target.embedding[ids].T)
    if isinstance(target.lm_head, RowMatrix):
        return Shortlist(ids, target.lm_head.value[ids].T)
    return Shortlist(ids, target.lm_head[:, ids])


def draft_head(config: DraftConfig, target: TargetParams, shortlist: Shortlist | None = None) -> dict[str, Any]:
    """The target's LM head, scaled and capped as the draft's config says: keyword arguments of `best_tokens`."""
    weights = head(target) if shortlist is None else {"weight": shortlist.head, "tied": False}
    return weights | {"multiplier": config.output_multiplier, "softcap": config.final_logit_softcap}


def propose(
    params: DraftParams,
    config: DraftConfig,
    target: TargetParams,
    context: Context,
    anchor: Int[Array, " rows"],
    drafts: int,
    temperature: Float[Array, " rows"],
    noise: Float[Array, "rows drafts candidates"] | None,
    *,
    shortlist: Shortlist | None = None,
    implementation: Implementation | None = None,
) -> Proposal:
    """Drafts a block for each row.

    Args:
      params, config: the draft.
      target: whose embedding and LM head the draft uses.
      context: the draft's pages; every row's holds exactly the tokens before its anchor.
      anchor: last committed token of each row.
      drafts: tokens to draft, k.
      temperature, noise: see `select`; DFlash 1 proposes the argmax whatever they are.
      shortlist: the tokens to propose from; all of the vocabulary when absent.
      implementation: of the kernels; see `kernels.choice`.
    """
    hidden = run_block(params, config, target.embedding, context, anchor, drafts, implementation=implementation)[:, 1:]
    with jax.named_scope("lm_head"):
        weights = draft_head(config, target, shortlist)
        scores, tokens = best_tokens(hidden, **weights, top_k=config.candidates, implementation=implementation)
        if shortlist is not None:
            tokens = shortlist.tokens[tokens]
    if params.selector is None:
        return argmax_proposal(tokens[..., 0], scores[..., 0], config.vocab_size)
    with jax.named_scope("selector"):
        return select(
            params.selector, hidden, tokens, scores, anchor, temperature, noise, implementation=implementation
        )
