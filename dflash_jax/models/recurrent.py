"""Gated DeltaNet layers: the states that they carry from token to token, and their forward.

A forward reads the states and leaves them as they are. What its tokens would change comes back to the caller, who
commits the part of it that counts.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.gated_delta import (
    Ingredients,
    RowStates,
    fold_block,
    gated_delta_block,
    gated_delta_prefill,
    gates,
    write_rows,
)
from dflash_jax.kernels.packing import Packing, pack, unpack
from dflash_jax.models.config import TransformerConfig
from dflash_jax.models.layers import rms_norm
from dflash_jax.models.weights import GatedDeltaWeights

Changes = tuple[Ingredients, ...] | tuple[RowStates, ...]
"""What a forward's tokens change, layer by layer: ingredients of a block, or the states after a prompt's chunk."""


class Recurrent(struct.PyTreeNode):
    """What Gated DeltaNet layers carry from token to token, of all slots.

    Attributes:
      states: a matrix per value head.
      conv_inputs: the last inputs of the convolutions, oldest first, in the model's dtype.
    """

    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"]
    conv_inputs: Float[Array, "gdn_layers slots channels taps"]


def init_recurrent(config: TransformerConfig, slots: int, dtype: jnp.dtype) -> Recurrent | None:
    """The states of slots before their first token; None for a model that has none."""
    layers = config.gated_delta_layers
    if not layers:
        return None
    shape = config.layers[layers[0]].gated_delta
    assert shape is not None
    states = (len(layers), slots, shape.num_value_heads, shape.key_dim, shape.value_dim)
    return Recurrent(
        states=jnp.zeros(states, jnp.float32),
        conv_inputs=jnp.zeros((len(layers), slots, shape.channels, shape.conv_width - 1), dtype),
    )


def commit(
    recurrent: Recurrent,
    changes: Changes,
    idx_mapping: Int[Array, " rows"],
    count: Int[Array, " rows"],
    *,
    implementation: Implementation | None = None,
) -> Recurrent:
    """The states after the tokens that count; in the same memory if donated.

    Args:
      recurrent: the states that the forward has read.
      changes: what it returned. Of a block, the first `count` of each row's tokens are folded in. Of a prompt's chunk,
        whose tokens all count, a row's states are written if its `count` is not 0.
      idx_mapping: row to slot; nothing is written for a negative one. No slot may stand here twice.
      count: accepted tokens of each row.
      implementation: of the kernels; see `kernels.dispatch`.
    """
    if isinstance(changes[0], Ingredients):
        states, conv_inputs = fold_block(
            recurrent.states,
            recurrent.conv_inputs,
            cast(tuple[Ingredients, ...], changes),
            idx_mapping,
            count,
            implementation=implementation,
        )
    else:
        rows = jnp.where(count > 0, idx_mapping, -1)
        states, conv_inputs = write_rows(
            recurrent.states, recurrent.conv_inputs, cast(tuple[RowStates, ...], changes), rows
        )
    return Recurrent(states=states, conv_inputs=conv_inputs)


def gated_delta_layer(
    x: Float[Array, "batch tokens hidden"],
    weights: GatedDeltaWeights,
    config: TransformerConfig,
    recurrent: Recurrent,
    idx_mapping: Int[Array, " rows"],
    q_len: Int[Array, " rows"],
    *,
    layer: int,
    prefill: bool,
    packing: Packing | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "batch tokens hidden"], Ingredients | RowStates]:
    """What a Gated DeltaNet layer adds to the residual stream, and what its tokens change.

    Args:
      x: normalised hidden states of new tokens.
      weights, config: the layer and its model.
      recurrent: the states of all slots.
      idx_mapping: row to slot; negative for an empty row.
      q_len: new tokens per row.
      layer: the layer's rank among Gated DeltaNet layers.
      prefill, packing: as of `models.target.extend`.
      implementation: of the kernels; see `kernels.dispatch`.
    """
    qkv = x @ weights.in_proj_qkv
    g, beta = gates(x @ weights.in_proj_a, x @ weights.in_proj_b, weights.a_log, weights.dt_bias)
    qkv, g, beta = (unpack(packed, packing) for packed in (qkv, g, beta))
    compute = gated_delta_prefill if prefill else gated_delta_block
    out, change = compute(
        qkv,
        g,
        beta,
        weights.conv,
        recurrent.states,
        recurrent.conv_inputs,
        idx_mapping,
        q_len,
        layer=layer,
        implementation=implementation,
    )
    out = pack(out, packing)
    z = (x @ weights.in_proj_z).reshape(out.shape)
    gated = rms_norm(out, weights.norm, config.rms_norm_eps) * jax.nn.silu(z.astype(jnp.float32))
    return gated.astype(x.dtype).reshape(*x.shape[:2], -1) @ weights.out_proj, change
