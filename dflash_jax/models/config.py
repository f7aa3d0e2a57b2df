"""What a model is: frozen, hashable descriptions of targets and drafts.

A config says everything about a model but its weights. It is a static argument of every jitted
function, so it holds only Python scalars and tuples. Reading one from a checkpoint is the business
of `dflash_jax.checkpoints`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from dflash_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: which rescaling of the wavelengths applies.
      factor: how far the context is stretched ("linear", "llama3", "yarn").
      original_max_position: context length before stretching ("llama3", "yarn").
      low_freq_factor, high_freq_factor: the band that "llama3" interpolates over.
      beta_fast, beta_slow: the band that "yarn" interpolates over, in rotations.
      attention_factor: what "yarn" multiplies cos and sin by.
      partial: the part of each head that turns, from its first channel on.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    partial: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """How many channels of a head turn."""
        return int(head_dim * self.partial)


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture-of-experts MLP: softmax router, top-k experts, SwiGLU each.

    Attributes:
      num_experts, experts_per_token: experts, and how many of them a token passes.
      intermediate_size: of an expert.
      normalize_top_k: whether the shares of a token's experts are made to sum to 1.
      shared_intermediate_size: of the expert that every token passes, by a gate of its own; None if there is none.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_top_k: bool
    shared_intermediate_size: int | None = None


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig:
    """A Gated DeltaNet layer (arXiv 2412.06464): a state per value head in place of keys and values.

    Attributes:
      num_key_heads: heads of queries and of keys.
      num_value_heads: heads of values; each key head serves a whole group of them.
      key_dim, value_dim: channels of a head.
      conv_width: inputs that the causal convolution before the heads sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_key_heads {self.num_key_heads} does not divide linear_num_value_heads "
                f"{self.num_value_heads}; every key head serves a whole group of value heads"
            )

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, all keys, all values."""
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
      window: attention reaches positions with |query - key| < window; None reaches all.
      causal: whether a query sees only keys at or before it.
      moe: the mixture of experts in place of the dense MLP, if any.
      gated_delta: the Gated DeltaNet in place of attention, if any.
    """

    window: int | None = None
    causal: bool = True
    moe: MoeConfig | None = None
    gated_delta: GatedDeltaConfig | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"an attention window of {self.window} lets nothing be seen; it must be 1 or more")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """What targets and drafts share.

    Attributes:
      vocab_size, ..., layers: sizes and layers.
      qk_norm: queries and keys are normalised per head.
      attention_bias: attention's projections have biases.
      attention_gate: attention's output is multiplied by a gate, which `q_proj` gives beside each head's query.
      zero_centred_norms: all norms multiply by 1 + weight; but not that of a Gated DeltaNet's output.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    qk_norm: bool
    attention_bias: bool
    attention_gate: bool = False
    zero_centred_norms: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads {self.num_kv_heads} does not divide "
                f"num_attention_heads {self.num_heads}; every KV head serves a whole group of heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        rotated = self.rope.rotated(self.head_dim)
        if rotated < 2 or rotated % 2 or rotated > self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor {self.rope.partial} turns {rotated} of the {self.head_dim} channels of a head, "
                f"but it must turn an even number of them, from 2 to {self.head_dim}"
            )
        if not self.attention_layers:
            raise ConfigError("no layer is of attention, but one at least must be")
        if len({layer.gated_delta for layer in self.layers} - {None}) > 1:
            raise ConfigError("Gated DeltaNet layers are of several shapes, but all must be of one")

    @property
    def num_layers(self) -> int:
        """Depth of the model."""
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values; a layer's rank among them is its layer in the pages."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.gated_delta is None)

    @property
    def gated_delta_layers(self) -> tuple[int, ...]:
        """The layers that have states; a layer's rank among them is its layer in `Recurrent`."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.gated_delta is not None)


@dataclasses.dataclass(frozen=True)
class TargetConfig(TransformerConfig):
    """The model whose output is wanted.

    Attributes:
      family: name of its family in `dflash_jax.families`; never for branching in the forward.
      mlp_bias: whether the dense MLP's projections have biases.
      tied_embeddings: the LM head is the transposed embedding.
      max_position: longest context the checkpoint says it was made for.
      eos_token_ids: tokens that end a generation unless a request ignores them.
      bos_token_id: token that begins a text, if the model has one.
    """

    family: str = "qwen3"
    mlp_bias: bool = False
    tied_embeddings: bool = False
    max_position: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


@dataclasses.dataclass(frozen=True)
class ConvConfig:
    """DFlash 2's grouped dynamic convolution: taps back in the block, channels per group."""

    taps: int
    group_size: int


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """DFlash 2's candidate selector: rank of the edge scores, candidates per position."""

    rank: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class DraftConfig(TransformerConfig):
    """A DFlash (conv and selector None) or DFlash 2 drafter.

    Attributes:
      block_size: tokens in the block it was trained on, the anchor included.
      mask_token_id: the token at the positions to be drafted.
      target_layer_ids: 0-based target layers whose outputs are the context features, in order.
      num_target_layers: depth of the target it was trained for, 0 if the checkpoint does not say.
      input_embedding_scale: multiplies the target's embedding of the block.
      output_multiplier: multiplies the logits, before the softcap.
      final_logit_softcap: c of c * tanh(logits / c); None for no cap.
      conv: DFlash 2's convolution, if the model has it.
      selector: DFlash 2's candidate selector, if the model has it.
    """

    block_size: int = 16
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()
    num_target_layers: int = 0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcap: float | None = None
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ConfigError(f"block_size {self.block_size} leaves nothing to draft; it must be 2 or more")
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty; a draft is conditioned on at least one target layer")
        if self.conv is not None and self.hidden_size % self.conv.group_size:
            raise ConfigError(f"conv_group_size {self.conv.group_size} does not divide hidden_size {self.hidden_size}")
        if self.selector is not None and not 0 < self.selector.top_k <= self.vocab_size:
            raise ConfigError(
                f"selector_top_k {self.selector.top_k} is outside 1..{self.vocab_size}, the vocabulary size"
            )

    @property
    def candidates(self) -> int:
        """Best tokens of each drafted position that the proposal is made from."""
        return 1 if self.selector is None else self.selector.top_k

    @property
    def title(self) -> str:
        """What its authors call it."""
        return "DFlash 2" if self.version == 2 else "DFlash"

    @property
    def version(self) -> int:
        """1 for DFlash, 2 for DFlash 2."""
        return 1 if self.selector is None else 2

    @property
    def kind(self) -> str:
        """The name that its `models.drafters.Drafter` is registered under."""
        return "dflash" if self.selector is None else "dflash2"


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The layers a draft is conditioned on when its config names none (`build_target_layer_ids`, dflash 0.1.0)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def check_pair(target: TargetConfig, draft: DraftConfig) -> None:
    """Raises ConfigError unless hidden size, vocabulary, mask token and layers of the draft fit the target."""
    if draft.hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft's hidden_size {draft.hidden_size} is not the target's {target.hidden_size}; "
            "a draft reads the target's hidden states and uses its embedding, so they must be equal"
        )
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft's vocab_size {draft.vocab_size} is not the target's {target.vocab_size}; "
            "a draft uses the target's LM head, so they must be equal"
        )
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise ConfigError(
            f"the draft's mask_token_id {draft.mask_token_id} is outside the target's vocabulary "
            f"of {target.vocab_size} tokens"
        )
    if max(draft.target_layer_ids) >= target.num_layers or min(draft.target_layer_ids) < 0:
        raise ConfigError(
            f"the draft's target_layer_ids {list(draft.target_layer_ids)} name layers the target does not "
            f"have; its layers are 0..{target.num_layers - 1}"
        )
    if draft.num_target_layers not in (0, target.num_layers):
        raise ConfigError(
            f"the draft was made for a target of {draft.num_target_layers} layers "
            f"(num_target_layers), but this target has {target.num_layers}"
        )
