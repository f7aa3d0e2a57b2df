"""AdamW as the papers train drafts with it, and Muon."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from dflash_jax.kernels.matmul.xla import mixed_matmul, mixed_products
from dflash_jax.models.matrix import is_matrix
from dflash_jax.training.config import UpdateSection
from dflash_jax.training.values import Dtype

# Of the quintic iteration that pushes singular values towards 1 (Jordan et al. 2024, "Muon").
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95
# Makes an update's entries as large as AdamW's, so that one learning rate serves both (arXiv 2502.16982).
_RMS = 0.2


def learning_rates(section: UpdateSection) -> optax.Schedule:
    """The learning rate of each step: a linear warm-up, then what the section says."""
    peak, steps = section.learning_rate, section.steps
    warmup = round(section.warmup * steps)
    rest = max(steps - warmup, 1)
    match section.schedule:
        case "constant":
            after: optax.Schedule = optax.constant_schedule(peak)
        case "linear":
            after = optax.linear_schedule(peak, peak * section.final, rest)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rest, alpha=section.final)
    # The first step moves too: step n of the warm-up has n + 1 parts of the peak.
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rising, after], [warmup])


def make_optimiser(section: UpdateSection, dtype: Dtype = "float32") -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW; or Muon for matrices and AdamW for all else.

    Args:
      section: its settings.
      dtype: of the factors of Muon's own products.
    """
    rates = learning_rates(section)
    if section.kind == "muon":
        muon = optax.chain(
            optax.trace(_MOMENTUM, nesterov=True),
            optax.stateless(lambda updates, _: jax.tree.map(functools.partial(orthogonalise, dtype=dtype), updates)),
            optax.add_decayed_weights(section.weight_decay),
            optax.scale_by_learning_rate(rates),
        )
        adam = optax.adamw(rates, b1=section.beta1, b2=section.beta2, weight_decay=0.0, nesterov=True)
        optimiser = optax.partition({True: muon, False: adam}, _are_matrices)
    else:
        optimiser = optax.adamw(
            rates, b1=section.beta1, b2=section.beta2, weight_decay=section.weight_decay, mask=_are_matrices
        )
    return optax.chain(optax.clip_by_global_norm(section.clip), optimiser)


def orthogonalise(matrix: Float[Array, "inputs outputs"], dtype: Dtype) -> Float[Array, "inputs outputs"]:
    """The nearest matrix with singular values near one, in the size of an update: Muon's.

    Args:
      matrix: a gradient, or momentum of gradients.
      dtype: of the factors of the products.
    """

    def gram(x):
        return mixed_products(x, x) if dtype == "bfloat16" else x @ x.T

    multiply = mixed_matmul if dtype == "bfloat16" else jnp.matmul
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-8)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = gram(x)
        x = a * x + multiply(b * square + c * multiply(square, square), x)
    return _RMS * max(x.shape) ** 0.5 * (x.T if tall else x)


def _are_matrices(params: PyTree):
    """Which weights are matrices: they decay, and Muon is for them."""
    return jax.tree.map(is_matrix, params, is_leaf=is_matrix)
