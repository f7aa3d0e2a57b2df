"""AdamW as the papers train drafts with it, and Muon."""

from __future__ import annotations

import jax
import optax
import optax.contrib
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from dflash_jax.training.config import UpdateSection
from dflash_jax.training.precision import is_matrix


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


def make_optimiser(section: UpdateSection) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW; or Muon for matrices and AdamW for all else."""
    rates = learning_rates(section)
    if section.kind == "muon":
        optimiser = optax.contrib.muon(
            rates,
            weight_decay=section.weight_decay,
            muon_weight_dimension_numbers=_orthogonalised,
            # An update's entries are as large as AdamW's, so one learning rate serves both (arXiv 2502.16982).
            consistent_rms=0.2,
            adam_b1=section.beta1,
            adam_b2=section.beta2,
        )
    else:
        optimiser = optax.adamw(
            rates, b1=section.beta1, b2=section.beta2, weight_decay=section.weight_decay, mask=_decays
        )
    return optax.chain(optax.clip_by_global_norm(section.clip), optimiser)


def _decays(params: PyTree):
    """Whether weight decay applies to each weight."""
    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _orthogonalised(params: PyTree):
    """The axes of the matrices that Muon updates; None for every other weight."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: MuonDimensionNumbers() if is_matrix(path, leaf) else None, params
    )
