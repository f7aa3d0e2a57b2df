"""The LM head in training: cross-entropy and candidates over chosen rows, in one pass over the logits.

The head is frozen, so the gradient of the loss with respect to the hidden states is known as soon as the
logits are. It is computed with them, chunk by chunk, and the logits are never kept.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import TargetParams
from dflash_jax.training.precision import mixed_products

_CHUNK_LOGITS = 4 * 1024 * 1024


@struct.dataclass
class HeadRows:
    """The rows of the LM head that a loss runs over.

    Attributes:
      tokens: the tokens they belong to, distinct.
      log_weight: how many tokens each stands for, as a logarithm: 0 for itself alone, more for one that
        was drawn from many.
    """

    tokens: Int[Array, " rows"]
    log_weight: Float[Array, " rows"]


@struct.dataclass
class HeadOutput:
    """What the head says about each position.

    Attributes:
      nll: negative log-likelihood of the label.
      candidates: the best tokens among the rows, best first.
    """

    nll: Float[Array, " positions"]
    candidates: Int[Array, "positions candidates"]


def head_matrix(target: TargetParams) -> Float[Array, "vocab hidden"]:
    """The target's LM head, a row per token."""
    return target.embedding if target.lm_head is None else target.lm_head.T


def all_rows(vocab_size: int) -> HeadRows:
    """The whole vocabulary."""
    return HeadRows(jnp.arange(vocab_size, dtype=jnp.int32), jnp.zeros(vocab_size))


def scale_logits(products: Float[Array, "*batch"], config: DraftConfig) -> Float[Array, "*batch"]:
    """Products of hidden states and head rows, scaled and capped as `head_logits` does."""
    logits = products * config.output_multiplier
    cap = config.final_logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def head_loss(
    config: DraftConfig,
    top_k: int,
    hidden: Float[Array, "positions hidden"],
    matrix: Float[Array, "vocab hidden"],
    rows: HeadRows,
    labels: Int[Array, " positions"],
    weights: Float[Array, " positions"],
    teacher: Float[Array, "positions hidden"] | None = None,
    soft: float = 0.0,
) -> tuple[Float[Array, ""], HeadOutput]:
    """Weighted sum of cross-entropies, and the candidates.

    A label that is none of the rows still takes part in its own position's softmax, so that every label
    has a gradient; it cannot be a candidate there.

    Args:
      config: the draft, for the scaling of its logits.
      top_k: candidates per position.
      hidden: the draft's final hidden states.
      matrix: the LM head; no gradient reaches it.
      rows: which of its rows the softmax runs over.
      labels: the true tokens.
      weights: of each position; 0 leaves it out.
      teacher: the target's final hidden states at each position, whose distribution over the same rows is
        learned from too; no gradient reaches them.
      soft: the share of the loss that it takes.
    """
    return _head_loss(config, top_k, soft, hidden, matrix, rows, labels, weights, teacher)


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


def _run(config, top_k, soft, hidden, matrix, rows, labels, weights, teacher, *, with_gradient):
    chosen = matrix[rows.tokens]
    products = mixed_products if matrix.dtype == jnp.bfloat16 else lambda x, table: x @ table.T
    place = jnp.full(matrix.shape[0], -1, jnp.int32).at[rows.tokens].set(jnp.arange(len(rows.tokens), dtype=jnp.int32))
    positions = hidden.shape[0]
    chunk = max(1, min(positions, _CHUNK_LOGITS // len(rows.tokens)))
    padding = -positions % chunk

    def one_chunk(args):
        hidden, labels, weights, teacher = args
        label_rows = matrix[labels].astype(hidden.dtype)
        is_label = jnp.arange(chosen.shape[0]) == place[labels][:, None]

        def split(hidden):
            """Products with the rows and, as it may be none of them, with the label's own."""
            return products(hidden, chosen), jnp.einsum("nh,nh->n", hidden, label_rows)

        def log_normaliser(logits, own):
            others = jnp.where(is_label, -jnp.inf, logits + rows.log_weight)
            return jnp.logaddexp(jax.nn.logsumexp(others, axis=-1), own)

        def loss(hidden):
            logits, own = (scale_logits(x, config) for x in split(hidden))
            total = log_normaliser(logits, own)
            nll = wrong = total - own
            if teacher is not None:
                wanted, wanted_own = split(teacher)
                wanted_total = log_normaliser(wanted, wanted_own)
                shares = jnp.exp(wanted + rows.log_weight - wanted_total[:, None])
                expected = jnp.sum(jnp.where(is_label, 0.0, shares * logits), axis=-1)
                expected += jnp.exp(wanted_own - wanted_total) * own
                wrong = (1 - soft) * nll + soft * (total - expected)
            return jnp.sum(wrong * weights), (nll, logits)

        if with_gradient:
            (value, (nll, logits)), gradient = jax.value_and_grad(loss, has_aux=True)(hidden)
        else:
            (value, (nll, logits)), gradient = loss(hidden), None
        _, best = jax.lax.top_k(jax.lax.stop_gradient(logits), top_k)
        return value, nll, rows.tokens[best], gradient

    padded = [
        jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])
        for x in (hidden, labels, weights, *(() if teacher is None else (teacher,)))
    ]
    chunks = (*padded, None) if teacher is None else tuple(padded)
    value, nll, candidates, gradient = jax.lax.map(one_chunk, chunks)
    output = HeadOutput(nll.reshape(-1)[:positions], candidates.reshape(-1, top_k)[:positions])
    return value.sum(), output, None if gradient is None else gradient.reshape(-1, gradient.shape[-1])[:positions]
