"""What is measured of a draft on labelled blocks: sums, and their means for logs."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float


@struct.dataclass
class DraftMetrics:
    """Sums over blocks: those of the parts of a batch add up to those of the batch.

    Only drafted positions that have a label count.

    Attributes:
      loss, selector_loss: weighted sums of cross-entropies.
      weight: sum of the positions' weights.
      positions: number of drafted positions, by place in the block.
      top1, recalled, chosen: of those, where the LM head's best token is the label, where the label is among the
        candidates, and where the selector, given the true predecessor, chooses the label.
      blocks: number of blocks with a label at every drafted position.
      accepted: number of drafted tokens in such blocks that are chosen, like all before them in the block.
    """

    loss: Float[Array, ""]
    selector_loss: Float[Array, ""]
    weight: Float[Array, ""]
    positions: Float[Array, " drafts"]
    top1: Float[Array, " drafts"]
    recalled: Float[Array, " drafts"]
    chosen: Float[Array, " drafts"]
    blocks: Float[Array, ""]
    accepted: Float[Array, ""]


def sum_metrics(
    loss: Float[Array, ""],
    selector_loss: Float[Array, ""],
    weight: Float[Array, ""],
    has_label: Bool[Array, "sequences anchors drafts"],
    top1: Bool[Array, "sequences anchors drafts"],
    recalled: Bool[Array, "sequences anchors drafts"],
    chosen: Bool[Array, "sequences anchors drafts"],
) -> DraftMetrics:
    """The metrics of blocks; see `DraftMetrics` for the arguments."""

    def count(x):
        return jnp.sum(x & has_label, axis=(0, 1)).astype(jnp.float32)

    whole = has_label.all(-1)
    prefix = jnp.cumprod(chosen & has_label, axis=-1).sum(-1)
    return DraftMetrics(
        loss=loss,
        selector_loss=selector_loss,
        weight=weight,
        positions=count(has_label),
        top1=count(top1),
        recalled=count(recalled),
        chosen=count(chosen),
        blocks=jnp.sum(whole).astype(jnp.float32),
        accepted=jnp.sum(prefix * whole).astype(jnp.float32),
    )


def metric_means(metrics: DraftMetrics) -> dict[str, float | list[float]]:
    """Means of summed metrics, for logs.

    `acceptance` is the mean acceptance length that greedy decoding would have on these anchors: one token
    of the target's own and the drafted ones before the first wrong choice.
    """

    def ratio(part, whole):
        return [round(float(p) / max(float(w), 1.0), 5) for p, w in zip(part, whole, strict=True)]

    weight = max(float(metrics.weight), 1e-9)
    return {
        "loss": float(metrics.loss) / weight,
        "selector_loss": float(metrics.selector_loss) / weight,
        "acceptance": 1 + float(metrics.accepted) / max(float(metrics.blocks), 1.0),
        "accuracy": ratio(metrics.top1, metrics.positions),
        "recall": ratio(metrics.recalled, metrics.positions),
        "chosen": ratio(metrics.chosen, metrics.positions),
        "selector_accuracy": ratio(metrics.chosen, metrics.recalled),
    }
