"""The losses that a draft is trained by.

DFlash (arXiv 2602.06036): cross-entropy at the drafted positions, later ones weighted less. DFlash 2 adds
the selector's cross-entropy over each position's candidates, given the true predecessor, at positions whose
label is a candidate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import DraftParams, SelectorWeights
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.objective.anchors import Anchors, block_labels
from dflash_jax.training.objective.forward import block_hidden
from dflash_jax.training.objective.head import head_loss, scale_logits
from dflash_jax.training.objective.metrics import DraftMetrics, sum_metrics
from dflash_jax.training.objective.sampled_softmax import VocabularySubset
from dflash_jax.training.objective.shared_weights import SharedWeights


def default_gamma(block_size: int) -> float:
    """The papers' decay: 4 at block size 8, 5 at 10, 7 at 16, on the line between and half the block below."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def position_weights(num_drafts: int, gamma: float) -> Float[Array, " drafts"]:
    """exp(-(i - 1) / gamma) at the i-th drafted position."""
    return jnp.exp(-jnp.arange(num_drafts) / gamma)


def draft_loss(
    params: DraftParams,
    config: DraftConfig,
    shared: SharedWeights,
    batch: Batch,
    anchors: Anchors,
    subset: VocabularySubset,
    *,
    gamma: float,
    selector_weight: float,
    soft: float = 0.0,
) -> tuple[Float[Array, ""], DraftMetrics]:
    """The loss, summed over positions and not divided by `DraftMetrics.weight`, and the metrics.

    Args:
      params, config: the draft.
      shared: the target's embedding and LM head.
      batch: sequences and features.
      anchors: the first positions of the blocks.
      subset: the tokens that the softmax runs over and candidates come from.
      gamma: decay of the weights along the block.
      selector_weight: weight of the selector's cross-entropy; that of the LM head's is 1.
      soft: share of the labels, in both, that is the target's distribution. It needs `batch.final`.
    """
    blocks, has_label = block_labels(batch.tokens, batch.seq_lens, anchors, config.block_size)
    hidden = block_hidden(params, config, shared.embedding, batch.features, anchors.positions, blocks[..., 0])[:, :, 1:]
    shape = has_label.shape
    hidden = hidden.reshape(-1, hidden.shape[-1])
    labels, predecessors = blocks[..., 1:].reshape(-1), blocks[..., :-1].reshape(-1)
    weights = (has_label * position_weights(shape[-1], gamma)).reshape(-1)
    teacher = None if soft == 0 else _teacher_states(batch, anchors, shape[-1])
    with jax.named_scope("head"):
        loss, output = head_loss(config, config.candidates, hidden, shared.head, subset, labels, weights, teacher, soft)

    match = output.candidates == labels[:, None]
    top1, recalled = match[:, 0], match.any(-1)
    selector_loss, chosen = jnp.zeros(()), top1
    if params.selector is not None:
        with jax.named_scope("selector"):
            scores = selector_scores(params.selector, config, shared.head, hidden, predecessors, output.candidates)
            nll = jax.nn.logsumexp(scores, -1, keepdims=True) - scores
            losses = (1 - soft) * jnp.sum(jnp.where(match, nll, 0.0), -1)
            if teacher is not None:
                probs = jax.nn.softmax(_candidate_logits(teacher, shared.head, output.candidates))
                losses += soft * jnp.sum(probs * nll, -1)
            selector_loss = jnp.sum(losses * weights)
            chosen = jnp.take_along_axis(match, jnp.argmax(scores, -1)[:, None], axis=-1)[:, 0]
    total = loss + selector_weight * selector_loss
    top1, recalled, chosen = (x.reshape(shape) for x in (top1, recalled, chosen))
    metrics = sum_metrics(loss, selector_loss, jnp.sum(weights), has_label, top1, recalled, chosen)
    return total, jax.lax.stop_gradient(metrics)


def selector_scores(
    selector: SelectorWeights,
    config: DraftConfig,
    head: Float[Array, "vocab hidden"],
    hidden: Float[Array, "positions hidden"],
    predecessors: Int[Array, " positions"],
    candidates: Int[Array, "positions candidates"],
) -> Float[Array, "positions candidates"]:
    """S(a, b) of each position's candidates b after its predecessor a; see `select_path`."""
    logits = _candidate_logits(hidden, head, candidates)
    gated = selector.predecessor_codebook[predecessors] * (hidden @ selector.hidden_projection)
    edges = jnp.einsum("nr,nkr->nk", gated, selector.successor_codebook[candidates], preferred_element_type=jnp.float32)
    return scale_logits(logits, config) + edges


def _teacher_states(batch: Batch, anchors: Anchors, num_drafts: int) -> Float[Array, "positions hidden"]:
    """The target's final hidden states before each drafted position, which predict its token."""
    assert batch.final is not None
    positions = anchors.positions[..., None] + jnp.arange(num_drafts)
    sequences = jnp.arange(positions.shape[0])[:, None, None]
    final = batch.final[sequences, jnp.minimum(positions, batch.final.shape[1] - 1)]
    return final.reshape(-1, final.shape[-1]).astype(jnp.float32)


def _candidate_logits(
    hidden: Float[Array, "positions hidden"],
    head: Float[Array, "vocab hidden"],
    candidates: Int[Array, "positions candidates"],
) -> Float[Array, "positions candidates"]:
    """Before `scale_logits`."""
    return jnp.einsum("nh,nkh->nk", hidden, head[candidates].astype(hidden.dtype))
