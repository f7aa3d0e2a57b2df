"""What a draft is trained to do, and how well it does it.

DFlash (arXiv 2602.06036): cross-entropy at the drafted positions, later ones counting less. DFlash 2 adds
a cross-entropy over each position's candidates, given the true predecessor, where the true token is one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import DraftParams, SelectorWeights
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.objective.anchors import Anchors, block_labels
from dflash_jax.training.objective.forward import block_hidden
from dflash_jax.training.objective.head import HeadRows, head_loss, scale_logits
from dflash_jax.training.objective.shared_weights import Vocabulary


@struct.dataclass
class Tally:
    """Sums over blocks, so that tallies of parts of a batch add up to the tally of the whole.

    A drafted token is `chosen` when the best candidate after the true predecessor is the true token.

    Attributes:
      loss, selector_loss: weighted sums of cross-entropies.
      weight: sum of the weights of the drafted positions that exist.
      count: drafted positions that exist, by place in the block.
      best, recalled, chosen: of those, where the best unary candidate is right, where the true token is
        a candidate, and where it is chosen.
      blocks: blocks that exist whole.
      accepted: drafted tokens of whole blocks that are chosen, and all before them in the block too.
    """

    loss: Float[Array, ""]
    selector_loss: Float[Array, ""]
    weight: Float[Array, ""]
    count: Float[Array, " drafts"]
    best: Float[Array, " drafts"]
    recalled: Float[Array, " drafts"]
    chosen: Float[Array, " drafts"]
    blocks: Float[Array, ""]
    accepted: Float[Array, ""]


def position_weights(drafts: int, gamma: float) -> Float[Array, " drafts"]:
    """exp(-(i - 1) / gamma) at the i-th drafted position."""
    return jnp.exp(-jnp.arange(drafts) / gamma)


def draft_loss(
    params: DraftParams,
    config: DraftConfig,
    vocabulary: Vocabulary,
    batch: Batch,
    anchors: Anchors,
    rows: HeadRows,
    *,
    gamma: float,
    selector_weight: float,
    soft: float = 0.0,
) -> tuple[Float[Array, ""], Tally]:
    """Sum over positions of what is minimised, not divided by `Tally.weight`, and the tally.

    Args:
      params, config: the draft.
      vocabulary: the target's embedding and LM head.
      batch: sequences and features.
      anchors: where its blocks begin.
      rows: rows of the LM head for the softmax and the candidates.
      gamma: decay of the weights along the block.
      selector_weight: what the selector's cross-entropy counts for beside the other.
      soft: share of the labels, in both, that is the target's distribution; `batch.final` gives it.
    """
    blocks, exists = block_labels(batch.tokens, batch.lengths, anchors, config.block_size)
    hidden = block_hidden(params, config, vocabulary.embedding, batch.features, anchors.positions, blocks[..., 0])[
        :, :, 1:
    ]
    shape = exists.shape
    hidden = hidden.reshape(-1, hidden.shape[-1])
    labels, predecessors = blocks[..., 1:].reshape(-1), blocks[..., :-1].reshape(-1)
    weights = (exists * position_weights(shape[-1], gamma)).reshape(-1)
    teacher = None if soft == 0 else _before_labels(batch, anchors, shape[-1])
    with jax.named_scope("head"):
        loss, output = head_loss(
            config, config.candidates, hidden, vocabulary.head, rows, labels, weights, teacher, soft
        )

    match = output.candidates == labels[:, None]
    best, recalled = match[:, 0], match.any(-1)
    selector_loss, chosen = jnp.zeros(()), best
    if params.selector is not None:
        with jax.named_scope("selector"):
            scores = selector_scores(params.selector, config, vocabulary.head, hidden, predecessors, output.candidates)
            surprise = jax.nn.logsumexp(scores, -1, keepdims=True) - scores
            losses = (1 - soft) * jnp.sum(jnp.where(match, surprise, 0.0), -1)
            if teacher is not None:
                wanted = jax.nn.softmax(_products(teacher, vocabulary.head, output.candidates))
                losses += soft * jnp.sum(wanted * surprise, -1)
            selector_loss = jnp.sum(losses * weights)
            chosen = jnp.take_along_axis(match, jnp.argmax(scores, -1)[:, None], axis=-1)[:, 0]
    total = loss + selector_weight * selector_loss
    best, recalled, chosen = (x.reshape(shape) for x in (best, recalled, chosen))
    tally = _tally(loss, selector_loss, jnp.sum(weights), exists, best, recalled, chosen)
    return total, jax.lax.stop_gradient(tally)


def selector_scores(
    selector: SelectorWeights,
    config: DraftConfig,
    head: Float[Array, "vocab hidden"],
    hidden: Float[Array, "positions hidden"],
    predecessors: Int[Array, " positions"],
    candidates: Int[Array, "positions candidates"],
) -> Float[Array, "positions candidates"]:
    """S(a, b) of each position's candidates b after its predecessor a; see `select_path`."""
    products = _products(hidden, head, candidates)
    gated = selector.predecessor_codebook[predecessors] * (hidden @ selector.hidden_projection)
    edges = jnp.einsum("nr,nkr->nk", gated, selector.successor_codebook[candidates], preferred_element_type=jnp.float32)
    return scale_logits(products, config) + edges


def _before_labels(batch: Batch, anchors: Anchors, drafts: int) -> Float[Array, "positions hidden"]:
    """The target's final hidden states that each drafted position's label was chosen from."""
    assert batch.final is not None
    places = anchors.positions[..., None] + jnp.arange(drafts)
    rows = jnp.arange(places.shape[0])[:, None, None]
    final = batch.final[rows, jnp.minimum(places, batch.final.shape[1] - 1)]
    return final.reshape(-1, final.shape[-1]).astype(jnp.float32)


def _products(
    hidden: Float[Array, "positions hidden"],
    head: Float[Array, "vocab hidden"],
    tokens: Int[Array, "positions candidates"],
) -> Float[Array, "positions candidates"]:
    return jnp.einsum("nh,nkh->nk", hidden, head[tokens].astype(hidden.dtype))


def _tally(
    loss: Float[Array, ""],
    selector_loss: Float[Array, ""],
    weight: Float[Array, ""],
    exists: Bool[Array, "sequences anchors drafts"],
    best: Bool[Array, "sequences anchors drafts"],
    recalled: Bool[Array, "sequences anchors drafts"],
    chosen: Bool[Array, "sequences anchors drafts"],
) -> Tally:
    def count(x):
        return jnp.sum(x & exists, axis=(0, 1)).astype(jnp.float32)

    whole = exists.all(-1)
    prefix = jnp.cumprod(chosen & exists, axis=-1).sum(-1)
    return Tally(
        loss=loss,
        selector_loss=selector_loss,
        weight=weight,
        count=count(exists),
        best=count(best),
        recalled=count(recalled),
        chosen=count(chosen),
        blocks=jnp.sum(whole).astype(jnp.float32),
        accepted=jnp.sum(prefix * whole).astype(jnp.float32),
    )


def report(tally: Tally) -> dict[str, float | list[float]]:
    """The figures of a tally, for logs.

    `acceptance` is the mean acceptance length that greedy decoding would have on these anchors: one token
    of the target's own and the drafted ones before the first wrong choice.
    """

    def ratio(part, whole):
        return [round(float(p) / max(float(w), 1.0), 5) for p, w in zip(part, whole, strict=True)]

    weight = max(float(tally.weight), 1e-9)
    return {
        "loss": float(tally.loss) / weight,
        "selector_loss": float(tally.selector_loss) / weight,
        "acceptance": 1 + float(tally.accepted) / max(float(tally.blocks), 1.0),
        "accuracy": ratio(tally.best, tally.count),
        "recall": ratio(tally.recalled, tally.count),
        "chosen": ratio(tally.chosen, tally.count),
        "selector_accuracy": ratio(tally.chosen, tally.recalled),
    }
