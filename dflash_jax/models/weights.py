"""Weights: plain pytrees, one node per part of a model.

A matrix is stored [in, out], so that `x @ weight` applies it; a `kernels.product.RowMatrix`, which an engine on a CPU
puts in its place, is applied in the same way. Layers are a tuple with one entry per
layer rather than one stack scanned over: a scan copies each layer's slice out of the stack before it
can multiply by it, which costs a decoding step a third of its time on the CPU and keeps layers from
differing in structure.
"""

from __future__ import annotations

import jax
from flax import struct
from jaxtyping import Array, Float


class Linear(struct.PyTreeNode):
    """y = x @ weight + bias."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"] | None = None


class AttentionWeights(struct.PyTreeNode):
    """Projections of one attention layer; the norms are per head and absent in Llama."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Float[Array, " head_dim"] | None = None
    k_norm: Float[Array, " head_dim"] | None = None


class MlpWeights(struct.PyTreeNode):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


class MoeWeights(struct.PyTreeNode):
    """A router and one SwiGLU per expert, experts stacked."""

    router: Float[Array, "hidden experts"]
    gate_proj: Float[Array, "experts hidden expert_hidden"]
    up_proj: Float[Array, "experts hidden expert_hidden"]
    down_proj: Float[Array, "experts expert_hidden hidden"]


class ConvWeights(struct.PyTreeNode):
    """Grouped dynamic convolution around one sublayer (DFlash 2).

    `base_kernel` is [side, tap, channel], side 0 before the sublayer and 1 after it;
    `kernel_projection` maps hidden to both sides' deltas, flattened [side, tap, group].
    """

    base_kernel: Float[Array, "2 taps hidden"]
    kernel_projection: Float[Array, "hidden deltas"]


class LayerWeights(struct.PyTreeNode):
    """One transformer layer; the convolutions belong to DFlash 2 drafts."""

    input_norm: Float[Array, " hidden"]
    attention: AttentionWeights
    post_attention_norm: Float[Array, " hidden"]
    mlp: MlpWeights | MoeWeights
    attention_conv: ConvWeights | None = None
    mlp_conv: ConvWeights | None = None


class TargetParams(struct.PyTreeNode):
    """A target. `lm_head` is None when it is the transposed embedding."""

    embedding: Float[Array, "vocab hidden"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " hidden"]
    lm_head: Float[Array, "hidden vocab"] | None = None


class SelectorWeights(struct.PyTreeNode):
    """DFlash 2's candidate selector."""

    predecessor_codebook: Float[Array, "vocab rank"]
    successor_codebook: Float[Array, "vocab rank"]
    hidden_projection: Float[Array, "hidden rank"]


class DraftParams(struct.PyTreeNode):
    """A draft. It has no embedding and no LM head: it uses the target's."""

    fc: Float[Array, "features hidden"]
    hidden_norm: Float[Array, " hidden"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " hidden"]
    selector: SelectorWeights | None = None


def is_matrix(path: tuple, leaf: Array) -> bool:
    """Whether a weight is one that activations are multiplied by: two-dimensional, and no table of rows."""
    name = jax.tree_util.keystr(path)
    return leaf.ndim == 2 and "codebook" not in name and "embedding" not in name
