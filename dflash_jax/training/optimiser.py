"""AdamW as the papers train drafts with it."""

from __future__ import annotations

import jax
import optax

from dflash_jax.models.weights import DraftParams, TargetParams
from dflash_jax.training.config import AdamSection
from dflash_jax.training.precision import is_matrix


def learning_rates(section: AdamSection) -> optax.Schedule:
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


def make_optimiser(section: AdamSection) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(section.clip),
        optax.adamw(
            learning_rates(section),
            b1=section.beta1,
            b2=section.beta2,
            weight_decay=section.weight_decay,
            mask=_decays,
        ),
    )


def _decays(params: DraftParams | TargetParams):
    """Whether weight decay applies to each weight."""
    return jax.tree_util.tree_map_with_path(is_matrix, params)
