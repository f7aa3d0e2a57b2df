"""The target's one forward: Q new tokens of each row against that row's cached context.

Prefill is Q = chunk, plain decoding Q = 1, verification Q = 1 + k. Pages and recurrent states are only read here; the
new tokens' keys and values, and what they change of the states, come back to the caller, who commits some of them.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.packing import Packing, pack, unpack
from dflash_jax.models.config import TargetConfig
from dflash_jax.models.layers import linear, mlp, moe, norm, project_gated_q, project_kv
from dflash_jax.models.lm_head import target_head
from dflash_jax.models.recurrent import Changes, Recurrent, gated_delta_layer
from dflash_jax.models.weights import GatedDeltaWeights, MoeWeights, TargetParams


class Extension(struct.PyTreeNode):
    """What running new tokens through the target yields; all but `changes` is packed if the tokens were.

    Attributes:
      hidden: final hidden states, normalised, ready for the LM head.
      features: states after the layers a draft is conditioned on, concatenated in the order asked for.
      entries: the new tokens' keys and values, of attention layers, for the pages.
      changes: what the new tokens change of the states of Gated DeltaNet layers, for `recurrent.commit`; None for a
        target without such layers.
    """

    hidden: Float[Array, "rows tokens hidden"]
    features: Float[Array, "rows tokens features"]
    entries: KeyValues
    changes: Changes | None = None


def extend(
    params: TargetParams,
    config: TargetConfig,
    context: Context,
    tokens: Int[Array, "rows tokens"],
    q_len: Int[Array, " rows"],
    *,
    recurrent: Recurrent | None = None,
    prefill: bool = False,
    packing: Packing | None = None,
    feature_layers: tuple[int, ...] = (),
    implementation: Implementation | None = None,
) -> Extension:
    """Runs each row's new tokens against its cached context.

    Args:
      params, config: the target.
      context: pages, block table, mapping and lengths; row r's first token stands at its context's end.
      tokens: token ids; anything at positions past q_len.
      q_len: new tokens per row, 0..tokens.
      recurrent: the states of Gated DeltaNet layers, of all slots; None for a target without them.
      prefill: the tokens are a prompt's, all of which count: Gated DeltaNet layers take them in chunks. Otherwise they
        are a block of at most 17, of which some may count, and change the states by the same bits as one by one.
      packing: runs only the tokens that are real, one behind the other: q_len of each row. None runs rows x tokens.
      feature_layers: 0-based layers whose outputs to return; `target_layer_ids` of the draft. As in transformers'
        `hidden_states[id + 1]`, the last layer's is the state after the final norm.
      implementation: of the kernels; see `kernels.dispatch`.

    Raises:
      ValueError: a target with Gated DeltaNet layers, and no states.
    """
    if config.gated_delta_layers and recurrent is None:
        raise ValueError("a target with Gated DeltaNet layers needs their states: recurrent is None")
    positions = pack(context.row_lengths()[:, None] + jnp.arange(tokens.shape[1]), packing)
    with jax.named_scope("embedding"):
        x = params.embedding[pack(tokens, packing)]
    keys: list[Array] = []
    values: list[Array] = []
    changes: list[Any] = []
    features: dict[int, Array] = {}
    for index, (weights, layer) in enumerate(zip(params.layers, config.layers, strict=True)):
        normed = norm(x, weights.input_norm, config)
        if isinstance(weights.attention, GatedDeltaWeights):
            assert recurrent is not None
            with jax.named_scope("gated_delta"):
                mixed, change = gated_delta_layer(
                    normed,
                    weights.attention,
                    config,
                    recurrent,
                    context.idx_mapping,
                    q_len,
                    layer=len(changes),
                    prefill=prefill,
                    packing=packing,
                    implementation=implementation,
                )
            changes.append(change)
        else:
            with jax.named_scope("attention"):
                q, gate = project_gated_q(normed, positions, weights.attention, config)
                k, v = project_kv(normed, positions, weights.attention, config)
                # Attention gives a token that may not be seen the weight 0, and 0 times NaN is NaN. Its keys stay what
                # they are, so that tokens that may see it compute NaN.
                v = jnp.where(jnp.isnan(v), 0, v)
                mixed = context.attend(
                    len(keys),
                    unpack(q, packing),
                    unpack(k, packing),
                    unpack(v, packing),
                    q_len,
                    causal=layer.causal,
                    window=layer.window,
                    scale=config.head_dim**-0.5,
                    implementation=implementation,
                )
                mixed = pack(mixed, packing)
                if gate is not None:
                    mixed = mixed * jax.nn.sigmoid(gate)
                mixed = linear(mixed.reshape(*mixed.shape[:2], -1), weights.attention.o_proj)
            keys.append(k)
            values.append(v)
        x = x + mixed
        with jax.named_scope("mlp"):
            normed = norm(x, weights.post_attention_norm, config)
            if isinstance(weights.mlp, MoeWeights):
                assert layer.moe is not None
                x = x + moe(normed, weights.mlp, layer.moe, implementation=implementation)
            else:
                x = x + mlp(normed, weights.mlp)
        if index in feature_layers:
            features[index] = x
    hidden = norm(x, params.norm, config)
    features[config.num_layers - 1] = hidden
    chosen = [features[index] for index in feature_layers]
    return Extension(
        hidden=hidden,
        features=jnp.concatenate(chosen, axis=-1) if chosen else jnp.zeros((*x.shape[:2], 0), x.dtype),
        entries=KeyValues(k=jnp.stack(keys), v=jnp.stack(values)),
        changes=cast(Changes, tuple(changes)) if changes else None,
    )


def lm_head(
    params: TargetParams, hidden: Float[Array, "*batch hidden"], *, implementation: Implementation | None = None
) -> Float[Array, "*batch vocab"]:
    """Logits in float32."""
    return target_head(params).logits(hidden, implementation=implementation)
