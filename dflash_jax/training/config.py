"""The config of a training run: the YAML of `dflash-jax train`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dflash_jax.training.values import (
    Directory,
    Dtype,
    Fraction,
    LayerIds,
    Layers,
    PathText,
    Positive,
    Scale,
    Seed,
    Size,
    Source,
    StrictSection,
    TokenId,
    Weight,
    Windows,
)

_MAX_RULE_TOKENS = 2**28


class DraftSection(StrictSection):
    """The draft to train: a checkpoint to continue from, or the shape of a fresh one.

    Attributes:
      path: a draft checkpoint; every other field must then be left out.
      num_layers: layers of a fresh draft; the target gives hidden size, heads and, unless
        `intermediate_size` is given, the width of the MLP.
      block_size: tokens of a block, the anchor included.
      mask_token_id: a token that never occurs in text and ends nothing.
      target_layer_ids: target layers whose outputs are the features; those of the published drafts when absent.
      version: 1 for DFlash, 2 for DFlash 2 (convolutions and selector).
      conv_taps, conv_group_size, selector_rank, selector_top_k: DFlash 2's sizes.
      windows: attention window of each layer, null for none; all without one when absent.
      causal: whether a block's tokens see only what is before them.
      intermediate_size: width of the MLP.
    """

    path: PathText | None = None
    num_layers: Layers = 2
    block_size: Annotated[int, Field(ge=2, le=1024)] = 8
    mask_token_id: TokenId | None = None
    target_layer_ids: LayerIds | None = None
    version: Annotated[int, Field(ge=1, le=2)] = 2
    conv_taps: Annotated[int, Field(gt=0, le=1024)] = 2
    conv_group_size: Size = 16
    selector_rank: Size = 64
    selector_top_k: Size = 8
    windows: Windows | None = None
    causal: bool = False
    intermediate_size: Size | None = None


class InitSection(StrictSection):
    """The weights that a fresh draft starts from.

    Attributes:
      fc: "scaled" draws it for features of unit variance, dividing by each feature's measured standard
        deviation; "plain" draws it for raw features; "last" passes the last layer's features through.
      layers: "random" draws them, "target" copies the target's last layers.
      second_tap: start of the convolutions' second tap before a sublayer; 0 is plain DFlash.
      scale: standard deviation of weights that are drawn, times 1 / sqrt(inputs).
      norm: start of the final norm's weights when layers are drawn: how large the first logits are.
      feature_sequences: sequences to measure the features on.
    """

    fc: Literal["plain", "scaled", "last"] = "scaled"
    layers: Literal["random", "target"] = "random"
    second_tap: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    scale: Scale = 0.5
    norm: Scale = 1.0
    feature_sequences: Size = 16


class RuleSection(StrictSection):
    """Sequences of the recall rule, for a target that has no text; see `dflash_jax.training.pretraining.recall_rule`.

    Attributes:
      sequences: how many.
      length: tokens of each.
      seed: of their beginnings and of the rule's permutation.
    """

    sequences: Size
    length: Annotated[int, Field(gt=11, le=2**20)] = 96
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_tokens(self) -> RuleSection:
        if self.sequences * self.length > _MAX_RULE_TOKENS:
            raise ValueError(
                f"{self.sequences} sequences of {self.length} are {self.sequences * self.length:,} tokens; "
                f"{_MAX_RULE_TOKENS:,} can be made at most"
            )
        return self


class DataSection(StrictSection):
    """Sequences, as `dflash-jax data generate` writes them, or of a rule.

    Attributes:
      path: directory of `*.arrayrecord` files.
      rule: writes them first, if the directory is not there.
      max_length: longer sequences are cut here; all are padded to it.
      held_out: share of the prompts kept for evaluation.
      min_answer: sequences with fewer tokens of the target's own are left out.
      features: directory for computed features, or null to compute them again every time.
      features_gb: refuse to cache more than this.
    """

    path: Directory
    rule: RuleSection | None = None
    max_length: Size = 512
    held_out: Fraction = 0.02
    min_answer: Positive = 2
    features: Directory | None = None
    features_gb: Scale = 20.0


class LossSection(StrictSection):
    """The loss.

    Attributes:
      gamma: decay along the block; the papers' for the block size when absent.
      selector_weight: weight of the selector's cross-entropy.
      soft: share of the labels that is the target's whole distribution; the rest is the token it chose.
      unseen: whether tokens that never occur in the data take part in the softmax.
      frequent: how many of the most frequent tokens are in every step's softmax; null for all.
      drawn: how many of the other tokens each step draws.
    """

    gamma: Scale | None = None
    selector_weight: Weight = 1.0
    soft: Fraction = 0.0
    unseen: bool = True
    frequent: Positive | None = None
    drawn: Annotated[int, Field(ge=0, lt=2**31)] = 0


class UpdateSection(StrictSection):
    """The optimiser, its schedule, and how much data a step has.

    Attributes:
      kind: "adamw", or "muon" (arXiv 2502.16982) for matrices with AdamW for everything else.
      steps: optimiser steps of the whole run.
      sequences: sequences of a step.
      learning_rate: its peak.
      schedule: what follows the warm-up.
      warmup: share of the steps.
      final: the learning rate at the end, as a share of the peak ("cosine" and "linear").
      clip: largest norm of the gradient.
      weight_decay: of matrices; never of norms, convolution taps and codebooks.
      beta1, beta2: AdamW's.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    steps: Positive
    sequences: Size = 4
    learning_rate: Scale = 6e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Fraction = 0.04
    final: Fraction = 0.0
    clip: Scale = 1.0
    weight_decay: Weight = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95


class OptimiserSection(UpdateSection):
    """The optimiser of a draft.

    Attributes:
      accumulate: parts that a step is computed in.
      anchors: per sequence.
    """

    accumulate: Size = 1
    anchors: Size = 128


class GatedDeltaShape(StrictSection):
    """The Gated DeltaNet layers of a fresh Qwen3.5, in the names of its `config.json`.

    Attributes:
      full_attention_interval: every so many layers one is of attention.
      partial_rotary_factor: the part of each of attention's heads that turns.
    """

    linear_num_key_heads: Annotated[int, Field(gt=0, le=1024)]
    linear_num_value_heads: Annotated[int, Field(gt=0, le=1024)]
    linear_key_head_dim: Annotated[int, Field(gt=0, le=1024)]
    linear_value_head_dim: Annotated[int, Field(gt=0, le=1024)]
    linear_conv_kernel_dim: Annotated[int, Field(gt=1, le=64)] = 4
    full_attention_interval: Layers = 4
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25


class TargetShape(StrictSection):
    """The sizes of a fresh Qwen3, or Qwen3.5, in the names of its `config.json`.

    Attributes:
      eos_token_id, bos_token_id: tokens that end and begin a text; null for none.
      gated_delta: makes it a Qwen3.5; null for a Qwen3.
    """

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Annotated[int, Field(gt=0, le=1024)]
    num_key_value_heads: Annotated[int, Field(gt=0, le=1024)]
    head_dim: Annotated[int, Field(gt=0, le=1024)]
    intermediate_size: Size
    rope_theta: Scale = 10_000.0
    rms_norm_eps: Scale = 1e-6
    max_position_embeddings: Positive = 4096
    tie_word_embeddings: bool = False
    eos_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    gated_delta: GatedDeltaShape | None = None


class PretrainSection(StrictSection):
    """A target trained from scratch, by next-token prediction on the run's own sequences.

    Attributes:
      shape: of the target.
      optimiser: its training.
      scale: standard deviation of fresh matrices, times 1 / sqrt(inputs).
    """

    shape: TargetShape
    optimiser: UpdateSection
    scale: Scale = 0.5


class CheckpointSection(StrictSection):
    """Checkpoints, under `output`.

    Attributes:
      every: steps between them.
      keep: how many of the latest stay.
    """

    every: Positive = 500
    keep: Positive = 2


class EvalSection(StrictSection):
    """Evaluation on held-out sequences, over the whole vocabulary.

    Attributes:
      every: steps between evaluations by teacher forcing; there is one at the end too.
      sequences: held-out sequences it runs over, at most.
      anchors: anchors of each.
      engine_every: steps between evaluations by decoding with the engine; null for none.
      engine_prompts: held-out prompts to answer, at most.
      engine_tokens: tokens of each answer.
    """

    every: Positive = 500
    sequences: Positive = 32
    anchors: Positive = 32
    engine_every: Positive | None = None
    engine_prompts: Positive = 16
    engine_tokens: Positive = 64


class TrainConfig(StrictSection):
    """A training run.

    Attributes:
      target: the target, as `load_target` takes it, or a mapping with that as its `path`, as in other configs.
      pretrain: makes the target first, if the directory `target` is not there.
      output: directory of checkpoints, metrics, plots and the exported draft.
      seed: of everything random.
      dtype: of the factors of matrix products; sums, weights and all else are float32.
      log_every: steps between lines of metrics.
      tensorboard: whether to write them as event files for TensorBoard, too.
    """

    target: Source
    pretrain: PretrainSection | None = None
    output: Directory
    seed: Seed = 0
    dtype: Dtype = "float32"
    log_every: Positive = 10
    tensorboard: bool = False
    draft: DraftSection
    init: InitSection = InitSection()
    data: DataSection
    loss: LossSection = LossSection()
    optimiser: OptimiserSection
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvalSection = EvalSection()
