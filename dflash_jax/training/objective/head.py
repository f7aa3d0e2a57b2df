"""The LM head in training: cross-entropy and candidates over a subset of the vocabulary, in one pass over the logits.

The head is frozen, so the gradient of the loss with respect to the hidden states is known as soon as the
logits are. It is computed with them, chunk by chunk, and the logits are never kept.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.kernels import lm_head
from dflash_jax.kernels.matmul.xla import mixed_products
from dflash_jax.models.config import DraftConfig
from dflash_jax.training.objective.sampled_softmax import VocabularySubset

_CHUNK_LOGITS = 4 * 1024 * 1024


@struct.dataclass
class HeadOutput:
    """What the head predicts at each position.

    Attributes:
      nll: negative log-likelihood of the label.
      candidates: the best tokens of the subset, best first.
    """

    nll: Float[Array, " positions"]
    candidates: Int[Array, "positions candidates"]


def scale_logits(logits: Float[Array, "*batch"], config: DraftConfig) -> Float[Array, "*batch"]:
    """Products of hidden states and the LM head, scaled and capped as in `head_logits`."""
    return lm_head.scale_logits(logits, config.output_multiplier, config.final_logit_softcap)


def head_loss(
    config: DraftConfig,
    top_k: int,
    hidden: Float[Array, "positions hidden"],
    matrix: Float[Array, "vocab hidden"],
    subset: VocabularySubset,
    labels: Int[Array, " positions"],
    weights: Float[Array, " positions"],
    teacher: Float[Array, "positions hidden"] | None = None,
    soft: float = 0.0,
) -> tuple[Float[Array, ""], HeadOutput]:
    """Weighted sum of cross-entropies, and the candidates.

    A label outside the subset still takes part in its own position's softmax, so that every label has a
    gradient. It cannot be a candidate there.

    Args:
      config: the draft, for the scaling of its logits.
      top_k: candidates per position.
      hidden: the draft's final hidden states.
      matrix: the LM head; no gradient reaches it.
      subset: the tokens that the softmax runs over.
      labels: the true tokens.
      weights: of each position; 0 leaves it out.
      teacher: the target's final hidden states at each position. Its distribution over the same tokens is
        learned from too; no gradient reaches it.
      soft: the teacher's share of the loss.
    """
    return _head_loss(config, top_k, soft, hidden, matrix, subset, labels, weights, teacher)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _head_loss(config, top_k, soft, hidden, *constants):
    return _run(config, top_k, soft, hidden, *constants, with_gradient=False)[:2]


def _forward(config, top_k, soft, hidden, *constants):
    loss, output, gradient = _run(config, top_k, soft, hidden, *constants, with_gradient=True)
    return (loss, output), (gradient, constants)


def _backward(config, top_k, soft, residuals, cotangents):
    gradient, constants = residuals
    # Only the loss is differentiated: nll and candidates are reports.
    scaled = (gradient * cotangents[0]).astype(gradient.dtype)
    return scaled, *(None for _ in constants)


_head_loss.defvjp(_forward, _backward)


def _run(config, top_k, soft, hidden, matrix, subset, labels, weights, teacher, *, with_gradient):
    subset_matrix = matrix[subset.tokens]
    matmul = mixed_products if matrix.dtype == jnp.bfloat16 else lambda x, table: x @ table.T
    size = len(subset.tokens)
    place_in_subset = jnp.full(matrix.shape[0], -1, jnp.int32).at[subset.tokens].set(jnp.arange(size, dtype=jnp.int32))
    positions = hidden.shape[0]
    chunk = max(1, min(positions, _CHUNK_LOGITS // size))
    padding = -positions % chunk

    def one_chunk(args):
        hidden, labels, weights, teacher = args
        label_vectors = matrix[labels].astype(hidden.dtype)
        is_label = jnp.arange(size) == place_in_subset[labels][:, None]

        def raw_logits(hidden):
            """Of the subset, and of the label, which may be outside it."""
            return matmul(hidden, subset_matrix), jnp.einsum("nh,nh->n", hidden, label_vectors)

        def log_normaliser(logits, label_logits):
            others = jnp.where(is_label, -jnp.inf, logits + subset.log_weight)
            return jnp.logaddexp(jax.nn.logsumexp(others, axis=-1), label_logits)

        def loss(hidden):
            logits, label_logits = (scale_logits(x, config) for x in raw_logits(hidden))
            log_z = log_normaliser(logits, label_logits)
            nll = cross_entropy = log_z - label_logits
            if teacher is not None:
                teacher_logits, teacher_label_logits = raw_logits(teacher)
                teacher_log_z = log_normaliser(teacher_logits, teacher_label_logits)
                probs = jnp.exp(teacher_logits + subset.log_weight - teacher_log_z[:, None])
                expected = jnp.sum(jnp.where(is_label, 0.0, probs * logits), axis=-1)
                expected += jnp.exp(teacher_label_logits - teacher_log_z) * label_logits
                cross_entropy = (1 - soft) * nll + soft * (log_z - expected)
            return jnp.sum(cross_entropy * weights), (nll, logits)

        if with_gradient:
            (value, (nll, logits)), gradient = jax.value_and_grad(loss, has_aux=True)(hidden)
        else:
            (value, (nll, logits)), gradient = loss(hidden), None
        _, best = jax.lax.top_k(jax.lax.stop_gradient(logits), top_k)
        return value, nll, subset.tokens[best], gradient

    padded = [
        jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])
        for x in (hidden, labels, weights, *(() if teacher is None else (teacher,)))
    ]
    chunks = (*padded, None) if teacher is None else tuple(padded)
    value, nll, candidates, gradient = jax.lax.map(one_chunk, chunks)
    output = HeadOutput(nll.reshape(-1)[:positions], candidates.reshape(-1, top_k)[:positions])
    return value.sum(), output, None if gradient is None else gradient.reshape(-1, gradient.shape[-1])[:positions]
