"""One optimiser step, and one evaluation, as jitted functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import DraftParams
from dflash_jax.training.config import LossSection, OptimiserSection
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.objective.anchors import Anchors, block_labels, sample_anchors
from dflash_jax.training.objective.losses import default_gamma, draft_loss, position_weights
from dflash_jax.training.objective.metrics import DraftMetrics
from dflash_jax.training.objective.sampled_softmax import SubsetPlan, draw_subset, whole_vocabulary
from dflash_jax.training.objective.shared_weights import SharedWeights
from dflash_jax.training.precision import in_precision
from dflash_jax.training.run.state import TrainState
from dflash_jax.training.values import Dtype

TrainStep = Callable[
    [TrainState, Batch, SharedWeights, SubsetPlan, Float[Array, " features"]], tuple[TrainState, DraftMetrics]
]
EvalStep = Callable[[DraftParams, Batch, SharedWeights, Float[Array, " features"], Int[Array, ""]], DraftMetrics]


def make_train_step(
    config: DraftConfig,
    dtype: Dtype,
    loss: LossSection,
    section: OptimiserSection,
    optimiser: optax.GradientTransformation,
) -> TrainStep:
    """The step function: (state, batch, shared weights, subset plan, feature scale) -> (state, metrics).

    It donates the state. The batch holds all sequences of the step, which are computed in `section.accumulate`
    parts; the gradient is that of the mean over all of them. Features are divided by the scale first.
    """
    gamma = loss.gamma or default_gamma(config.block_size)
    parts = section.accumulate

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch, shared, plan, scale):
        anchor_key, subset_key = jax.random.split(state.step_key())
        anchors = sample_anchors(anchor_key, batch.prompt_lens, batch.seq_lens, batch.tokens.shape[1], section.anchors)
        subset = draw_subset(subset_key, plan)
        _, has_label = block_labels(batch.tokens, batch.seq_lens, anchors, config.block_size)
        weight = jnp.sum(has_label * position_weights(config.block_size - 1, gamma))

        def part_loss(params, part: Batch, anchors: Anchors):
            total, metrics = draft_loss(
                in_precision(params, dtype),
                config,
                shared,
                _scaled(part, scale),
                anchors,
                subset,
                gamma=gamma,
                selector_weight=loss.selector_weight,
                soft=loss.soft,
            )
            return total / jnp.maximum(weight, 1e-9), metrics

        def add_part(sums, part):
            (_, metrics), gradient = jax.value_and_grad(part_loss, has_aux=True)(state.params, *part)
            return jax.tree.map(jnp.add, sums, (gradient, metrics)), None

        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (batch, anchors))
        first = jax.tree.map(lambda x: x[0], split)
        shapes = jax.eval_shape(lambda: _part_sums(part_loss, state.params, first))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (gradient, metrics), _ = jax.lax.scan(add_part, zeros, split)
        updates, optimiser_state = optimiser.update(gradient, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, optimiser=optimiser_state, step=state.step + 1), metrics

    return step


def _part_sums(part_loss, params, part):
    (_, metrics), gradient = jax.value_and_grad(part_loss, has_aux=True)(params, *part)
    return gradient, metrics


def make_eval_step(config: DraftConfig, dtype: Dtype, loss: LossSection, anchors_per_sequence: int) -> EvalStep:
    """Teacher forcing over the whole vocabulary: (params, batch, shared weights, feature scale, seed) -> metrics.

    The seed decides the anchors.
    """
    gamma = loss.gamma or default_gamma(config.block_size)

    @jax.jit
    def evaluate(params, batch, shared, scale, seed):
        anchors = sample_anchors(
            jax.random.fold_in(jax.random.key(0), seed),
            batch.prompt_lens,
            batch.seq_lens,
            batch.tokens.shape[1],
            anchors_per_sequence,
        )
        return draft_loss(
            in_precision(params, dtype),
            config,
            shared,
            _scaled(batch, scale),
            anchors,
            whole_vocabulary(config.vocab_size),
            gamma=gamma,
            selector_weight=loss.selector_weight,
        )[1]

    return evaluate


def _scaled(batch: Batch, scale: Float[Array, " features"]) -> Batch:
    return dataclasses.replace(batch, features=batch.features.astype(jnp.float32) / scale)
