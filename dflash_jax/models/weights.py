"""Weights: plain pytrees, one node per part of a model.

What activations are multiplied by is a `Matrix`: `x @ weight` applies it, whatever its layout. Experts' matrices, which
`ragged_dot` multiplies by in groups, are arrays. Layers are a tuple with one entry per layer rather than one stack
scanned over: a scan copies each layer's slice out of the stack before it can multiply by it, which costs a decoding
step a third of its time on the CPU and keeps layers from differing in structure.
"""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float

from dflash_jax.kernels.compact import Compact
from dflash_jax.models.matrix import Matrix


class Linear(struct.PyTreeNode):
    """y = x @ weight + bias; weight is inputs to outputs."""

    weight: Matrix
    bias: Float[Array, " outputs"] | None = None


class AttentionWeights(struct.PyTreeNode):
    """Projections of one attention layer; the norms are per head and absent in Llama.

    Where attention has a gate, `q_proj` gives [head, query or gate, head_dim].
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Float[Array, " head_dim"] | None = None
    k_norm: Float[Array, " head_dim"] | None = None


class GatedDeltaWeights(struct.PyTreeNode):
    """One Gated DeltaNet layer (arXiv 2412.06464).

    Attributes:
      in_proj_qkv: to the convolution's channels: all queries, all keys, all values.
      in_proj_z: to the gate of the output.
      in_proj_b, in_proj_a: to what `kernels.gated_delta.gates` makes gates of, with a_log and dt_bias.
      conv: its oldest input first.
      norm: of each head's output, as it is.
      out_proj: from all value heads.
    """

    in_proj_qkv: Matrix
    in_proj_z: Matrix
    in_proj_b: Matrix
    in_proj_a: Matrix
    conv: Float[Array, "channels width"]
    a_log: Float[Array, " value_heads"]
    dt_bias: Float[Array, " value_heads"]
    norm: Float[Array, " value_dim"]
    out_proj: Matrix


class MlpWeights(struct.PyTreeNode):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


class SharedExpertWeights(struct.PyTreeNode):
    """The expert that every token passes, and its gate (hidden to 1)."""

    gate: Matrix
    mlp: MlpWeights


class MoeWeights(struct.PyTreeNode):
    """A router (hidden to experts) and one SwiGLU per expert, experts stacked."""

    router: Matrix
    gate_proj: Float[Array, "experts hidden expert_hidden"]
    up_proj: Float[Array, "experts hidden expert_hidden"]
    down_proj: Float[Array, "experts expert_hidden hidden"]
    shared: SharedExpertWeights | None = None


class ConvWeights(struct.PyTreeNode):
    """Grouped dynamic convolution around one sublayer (DFlash 2).

    `base_kernel` is [side, tap, channel], side 0 before the sublayer and 1 after it;
    `kernel_projection` maps hidden to both sides' deltas, flattened [side, tap, group].
    """

    base_kernel: Float[Array, "2 taps hidden"]
    kernel_projection: Matrix


class LayerWeights(struct.PyTreeNode):
    """One layer of attention, or what stands in its place, and an MLP; the convolutions belong to DFlash 2 drafts."""

    input_norm: Float[Array, " hidden"]
    attention: AttentionWeights | GatedDeltaWeights
    post_attention_norm: Float[Array, " hidden"]
    mlp: MlpWeights | MoeWeights
    attention_conv: ConvWeights | None = None
    mlp_conv: ConvWeights | None = None


class TargetParams(struct.PyTreeNode):
    """A target. `lm_head` is None when it is the transposed embedding."""

    embedding: Float[Array, "vocab hidden"] | Compact
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " hidden"]
    lm_head: Matrix | None = None


class SelectorWeights(struct.PyTreeNode):
    """DFlash 2's candidate selector; `hidden_projection` maps hidden to rank."""

    predecessor_codebook: Float[Array, "vocab rank"]
    successor_codebook: Float[Array, "vocab rank"]
    hidden_projection: Matrix


class DraftParams(struct.PyTreeNode):
    """A draft. It has no embedding and no LM head: it uses the target's. `fc` maps features to hidden."""

    fc: Matrix
    hidden_norm: Float[Array, " hidden"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " hidden"]
    selector: SelectorWeights | None = None
