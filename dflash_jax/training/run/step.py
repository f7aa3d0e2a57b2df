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
from dflash_jax.training.config import Dtype, LossSection, OptimiserSection
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.objective.anchors import Anchors, block_labels, sample_anchors
from dflash_jax.training.objective.head import all_rows
from dflash_jax.training.objective.losses import Tally, draft_loss, position_weights
from dflash_jax.training.objective.sampled_softmax import RowPlan, draw_rows
from dflash_jax.training.objective.shared_weights import Vocabulary
from dflash_jax.training.precision import in_precision
from dflash_jax.training.run.state import TrainState

TrainStep = Callable[[TrainState, Batch, Vocabulary, RowPlan, Float[Array, " features"]], tuple[TrainState, Tally]]
EvalStep = Callable[[DraftParams, Batch, Vocabulary, Float[Array, " features"], Int[Array, ""]], Tally]


def default_gamma(block_size: int) -> float:
    """The papers' decay: 4 at block size 8, 5 at 10, 7 at 16, on the line between and half the block below."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def make_train_step(
    config: DraftConfig,
    dtype: Dtype,
    loss: LossSection,
    section: OptimiserSection,
    optimiser: optax.GradientTransformation,
) -> TrainStep:
    """The step function. It donates the state it is given.

    Its batch holds all sequences of the step, which it works through in `section.accumulate` parts; the
    gradient is that of the mean over all of them. The features are divided by the given scale first.
    """
    gamma = loss.gamma or default_gamma(config.block_size)
    parts = section.accumulate

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch, vocabulary, plan, scale):
        anchor_key, row_key = jax.random.split(state.step_key())
        anchors = sample_anchors(anchor_key, batch.prompt_lens, batch.lengths, batch.tokens.shape[1], section.anchors)
        rows = draw_rows(row_key, plan)
        _, exists = block_labels(batch.tokens, batch.lengths, anchors, config.block_size)
        weight = jnp.sum(exists * position_weights(config.block_size - 1, gamma))

        def part_loss(params, part: Batch, anchors: Anchors):
            total, tally = draft_loss(
                in_precision(params, dtype),
                config,
                vocabulary,
                _scaled(part, scale),
                anchors,
                rows,
                gamma=gamma,
                selector_weight=loss.selector_weight,
                soft=loss.soft,
            )
            return total / jnp.maximum(weight, 1e-9), tally

        def add_part(sums, part):
            (_, tally), gradient = jax.value_and_grad(part_loss, has_aux=True)(state.params, *part)
            return jax.tree.map(jnp.add, sums, (gradient, tally)), None

        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (batch, anchors))
        first = jax.tree.map(lambda x: x[0], split)
        shapes = jax.eval_shape(lambda: _part_sums(part_loss, state.params, first))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (gradient, tally), _ = jax.lax.scan(add_part, zeros, split)
        updates, optimiser_state = optimiser.update(gradient, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, optimiser=optimiser_state, step=state.step + 1), tally

    return step


def _part_sums(part_loss, params, part):
    (_, tally), gradient = jax.value_and_grad(part_loss, has_aux=True)(params, *part)
    return gradient, tally


def make_eval_step(config: DraftConfig, dtype: Dtype, loss: LossSection, anchors_per_sequence: int) -> EvalStep:
    """Teacher forcing over the whole vocabulary; the number given last seeds the anchors."""
    gamma = loss.gamma or default_gamma(config.block_size)

    @jax.jit
    def evaluate(params, batch, vocabulary, scale, number):
        anchors = sample_anchors(
            jax.random.fold_in(jax.random.key(0), number),
            batch.prompt_lens,
            batch.lengths,
            batch.tokens.shape[1],
            anchors_per_sequence,
        )
        return draft_loss(
            in_precision(params, dtype),
            config,
            vocabulary,
            _scaled(batch, scale),
            anchors,
            all_rows(config.vocab_size),
            gamma=gamma,
            selector_weight=loss.selector_weight,
        )[1]

    return evaluate


def _scaled(batch: Batch, scale: Float[Array, " features"]) -> Batch:
    return dataclasses.replace(batch, features=batch.features.astype(jnp.float32) / scale)
