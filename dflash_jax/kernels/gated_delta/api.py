"""Gated DeltaNet's recurrent part as ops, dispatched to their implementations.

A layer's projections of a token are concatenated in `qkv`: all queries, all keys, all values. They pass a causal
depthwise convolution and silu; queries and keys are normalised; then each value head's state S [key_dim, value_dim]
is decayed, corrected and read (arXiv 2412.06464):

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  out = S^T q

States are stored by slot, reached through `idx_mapping`. Only `fold_block` and `write_rows` write them. `fold_block`
folds in a block's tokens once it is known how many were accepted. A prompt's tokens are all accepted, so
`write_rows` stores the states at the end of its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation, choose
from dflash_jax.kernels.gated_delta.parts import Ingredients, RowStates, to_slots, zero_after


def gated_delta_block(
    qkv: Float[Array, "rows tokens channels"],
    g: Float[Array, "rows tokens value_heads"],
    beta: Float[Array, "rows tokens value_heads"],
    conv_weight: Float[Array, "channels width"],
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    idx_mapping: Int[Array, " rows"],
    q_len: Int[Array, " rows"],
    *,
    layer: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows tokens value_heads value_dim"], Ingredients]:
    """A block's outputs after each row's slot's state, which stays as it is, and what `fold_block` needs to add to it.

    On CPUs a token's output is bitwise the same in a block as alone, with the tokens before it folded one by one.

    Args:
      qkv: projections of the block's tokens: 2 key_heads key_dim + value_heads value_dim channels.
      g, beta: their `gates`.
      conv_weight: of the convolution, its oldest input first.
      states: of all slots, float32; read only.
      conv_inputs: of all slots, the last width - 1 inputs of the convolution, oldest first; read only.
      idx_mapping: row to slot; negative for an empty row.
      q_len: tokens per row, 0..tokens; the rest is padding.
      layer: which layer's states to read.
      implementation: overrides what the platform decides; see `kernels.dispatch`.

    Returns:
      Outputs in qkv's dtype, zeros at empty rows and padding; ingredients, whose padding is anything.
    """
    compute = choose("gated_delta_block", implementation, states, conv_inputs, qkv).compute
    out, block = compute(qkv, g, beta, conv_weight, states, conv_inputs, idx_mapping, q_len, layer=layer)
    return out, block.replace(g=block.g + zero_after(out, block.k).astype(block.g.dtype))


def fold_block(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    blocks: Sequence[Ingredients],
    idx_mapping: Int[Array, " rows"],
    accepted: Int[Array, " rows"],
    *,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "gdn_layers slots value_heads key_dim value_dim"], Float[Array, "gdn_layers slots channels taps"]
]:
    """The slots' states and convolution inputs after the accepted tokens of a block; in the same memory if donated.

    A token that is not accepted leaves the state bitwise unchanged. On CPUs the states are bitwise those after
    folding the tokens one by one.

    Args:
      states, conv_inputs: of all slots, as `gated_delta_block` read them.
      blocks: the ingredients of each layer.
      idx_mapping: row to slot; nothing is written for a negative one. No slot may stand here twice.
      accepted: how many of each row's tokens count.
      implementation: overrides what the platform decides; see `kernels.dispatch`.
    """
    compute = choose("fold_block", implementation, states, conv_inputs, blocks[0].qkv).compute
    idx_mapping += zero_after(*(block.g for block in blocks))
    for layer, block in enumerate(blocks):
        states, conv_inputs = compute(states, conv_inputs, block, idx_mapping, accepted, layer=layer)
    return states, conv_inputs


def gated_delta(
    qkv: Float[Array, "rows tokens channels"],
    g: Float[Array, "rows tokens value_heads"],
    beta: Float[Array, "rows tokens value_heads"],
    conv_weight: Float[Array, "channels width"],
    count: Int[Array, " rows"],
    start: RowStates,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows tokens value_heads value_dim"], RowStates]:
    """Outputs of many tokens and the states at their end, without slots; for training, and differentiable.

    Args:
      qkv, g, beta, conv_weight: as of `gated_delta_block`.
      count: tokens per row, 0..tokens; the rest is padding.
      start: what the rows carry into their first token; zeros at a sequence's beginning.
      implementation: overrides what the platform decides; see `kernels.dispatch`.

    Returns:
      Outputs in qkv's dtype, zeros at padding; what each row carries on after its last token.
    """
    compute = choose("gated_delta", implementation).compute
    return compute(qkv, g, beta, conv_weight, count, start)


def gated_delta_prefill(
    qkv: Float[Array, "rows tokens channels"],
    g: Float[Array, "rows tokens value_heads"],
    beta: Float[Array, "rows tokens value_heads"],
    conv_weight: Float[Array, "channels width"],
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    idx_mapping: Int[Array, " rows"],
    q_len: Int[Array, " rows"],
    *,
    layer: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows tokens value_heads value_dim"], RowStates]:
    """`gated_delta` of a prompt's chunk after each row's slot's state, which stays as it is.

    Args:
      qkv, ..., implementation: as of `gated_delta_block`.

    Returns:
      Outputs in qkv's dtype, zeros at empty rows and padding; the states that `write_rows` puts in their slots.
    """
    compute = choose("gated_delta_prefill", implementation, states, conv_inputs, qkv).compute
    return compute(qkv, g, beta, conv_weight, states, conv_inputs, idx_mapping, q_len, layer=layer)


def write_rows(
    states: Float[Array, "gdn_layers slots value_heads key_dim value_dim"],
    conv_inputs: Float[Array, "gdn_layers slots channels taps"],
    ends: Sequence[RowStates],
    idx_mapping: Int[Array, " rows"],
) -> tuple[
    Float[Array, "gdn_layers slots value_heads key_dim value_dim"], Float[Array, "gdn_layers slots channels taps"]
]:
    """The slots' states and convolution inputs with the rows' in their place; in the same memory if donated.

    Args:
      states, conv_inputs: of all slots.
      ends: of each layer, as `gated_delta_prefill` returned them.
      idx_mapping: row to slot; nothing is written for a negative one. No slot may stand here twice.
    """
    idx_mapping += zero_after(*jax.tree.leaves(tuple(ends)))
    for layer, end in enumerate(ends):
        states, conv_inputs = to_slots(states, conv_inputs, end, idx_mapping, layer)
    return states, conv_inputs
