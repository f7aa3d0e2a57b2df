"""What a run needs before its first step: the target, the data, the features and the starting draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax.checkpoints import LoadedTarget, load_target
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import DraftParams
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.data.dataset import Dataset, Order, open_data
from dflash_jax.training.data.feature_cache import CachedFeatures, Features
from dflash_jax.training.data.features import FeatureExtractor, fingerprint
from dflash_jax.training.drafts.feature_scale import feature_scale, scale_features, unscale_features
from dflash_jax.training.drafts.init import fresh_params
from dflash_jax.training.drafts.start import check_mask_token, starting_draft
from dflash_jax.training.objective.sampled_softmax import RowPlan, plan_rows
from dflash_jax.training.objective.shared_weights import Vocabulary, borrow
from dflash_jax.training.optimiser import make_optimiser
from dflash_jax.training.run.checks import check_draft, check_shapes
from dflash_jax.training.run.state import TrainState, initial_state
from dflash_jax.training.run.store import RunStore


@dataclasses.dataclass(frozen=True)
class Run:
    """What does not change while a run goes on."""

    config: TrainConfig
    target: LoadedTarget
    draft_config: DraftConfig
    dataset: Dataset
    features: Features
    vocabulary: Vocabulary
    plan: RowPlan
    scale: Float[Array, " features"]
    start: TrainState

    def batch(self, indices: list[int]) -> Batch:
        """Sequences and their features, padded."""
        sequences = [self.dataset.sequence(index) for index in indices]
        length = self.dataset.max_length
        states = [self.features.read(index) for index in indices]
        padded = np.zeros((len(indices), length, states[0].shape[1]), states[0].dtype)
        tokens = np.zeros((len(indices), length), np.int32)
        for row, (sequence, of_sequence) in enumerate(zip(sequences, states, strict=True)):
            tokens[row, : len(sequence.tokens)] = sequence.tokens
            padded[row, : len(of_sequence)] = of_sequence
        prompt_lens = np.asarray([sequence.prompt_len for sequence in sequences], np.int32)
        lengths = np.asarray([len(sequence.tokens) for sequence in sequences], np.int32)
        features, final = np.split(padded, [len(self.scale)], axis=-1)
        batch = Batch(*(jnp.asarray(x) for x in (tokens, prompt_lens, lengths, features)))
        return batch if self.config.loss.soft == 0 else dataclasses.replace(batch, final=jnp.asarray(final))

    def export(self, params: DraftParams) -> DraftParams:
        """Weights of a state as those of a draft for raw features."""
        return unscale_features(params, self.scale)


def prepare(config: TrainConfig, store: RunStore) -> Run:
    """Loads and checks everything that a config names.

    Raises:
      ConfigError: a config that cannot work, or not the one that the run was started with.
      CheckpointError: a target or draft that cannot be read.
    """
    target = load_target(config.target, "float32")
    dataset = open_data(config.data, target.config.vocab_size)
    check_shapes(config)
    start, draft_config = starting_draft(config, target)
    check_mask_token(draft_config.mask_token_id, target.config, dataset)
    loss = config.loss
    plan = plan_rows(dataset.counts, unseen=loss.unseen, frequent=loss.frequent, drawn=loss.drawn)
    check_draft(config, draft_config, target.config, dataset, plan)
    facts = facts_of(config, target, start, draft_config)
    store.claim(config, {**facts, "data fingerprint": dataset.fingerprint})
    features = _open_features(config, target, draft_config, dataset, facts["target fingerprint"])
    if store.latest_step() is None:
        store.save_scale(_measure_scale(config, draft_config, dataset, features))
    scale = jnp.asarray(store.load_scale())
    key = jax.random.key(config.seed)
    if start is None:
        params = fresh_params(jax.random.fold_in(key, 1), draft_config, config.init, target.params, target.config)
    else:
        params = scale_features(start, scale)
    state = initial_state(params, make_optimiser(config.optimiser, config.dtype), jax.random.fold_in(key, 2))
    vocabulary = borrow(target.params, config.dtype)
    return Run(config, target, draft_config, dataset, features, vocabulary, plan, scale, state)


def facts_of(
    config: TrainConfig, target: LoadedTarget, start: DraftParams | None, draft_config: DraftConfig
) -> dict[str, Any]:
    """What weights depend on beside a run's settings and its data.

    Args:
      config: the run.
      target: its target.
      start, draft_config: as `starting_draft` gives them.
    """
    facts: dict[str, Any] = {
        "target fingerprint": fingerprint(target.params, target.config),
        # Features are rounded where they are kept, and not where they are computed every time.
        "features in bfloat16": config.data.features is not None,
    }
    if start is not None:
        facts["draft fingerprint"] = fingerprint(start, draft_config)
    return facts


def _open_features(
    config: TrainConfig, target: LoadedTarget, draft: DraftConfig, dataset: Dataset, target_fingerprint: str
) -> Features:
    extractor = FeatureExtractor(target.params, target.config, config.dtype)
    layers = draft.target_layer_ids
    if config.loss.soft:
        layers = (*layers, target.config.num_layers)
    if config.data.features is None:
        return Features(dataset, extractor, layers)
    return CachedFeatures(
        dataset,
        extractor,
        layers,
        directory=config.data.features,
        target=target_fingerprint,
        dtype=config.dtype,
        hidden=target.config.hidden_size,
        limit_gb=config.data.features_gb,
    )


def _measure_scale(
    config: TrainConfig, draft: DraftConfig, dataset: Dataset, features: Features
) -> Float[np.ndarray, " features"]:
    width = draft.hidden_size * len(draft.target_layer_ids)
    if config.init.fc == "plain" and config.draft.path is None:
        return np.ones(width, np.float32)
    chosen = Order(dataset, config.seed, config.init.feature_sequences).sequences(0)
    return feature_scale([features.read(index)[:, :width] for index in chosen])


def build_features(config: TrainConfig, report_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Computes the features of all sequences of a run ahead of it.

    Args:
      config: the run; its `data.features` says where to.
      report_progress: called with the sequences done and their number.

    Raises:
      ConfigError: no `data.features`, or one that belongs to something else.
    """
    if config.data.features is None:
        raise ConfigError("data.features is missing; it must name the directory for the computed features")
    target = load_target(config.target, "float32")
    dataset = open_data(config.data, target.config.vocab_size)
    _, draft_config = starting_draft(config, target)
    features = _open_features(config, target, draft_config, dataset, fingerprint(target.params, target.config))
    indices = np.sort(np.concatenate([dataset.train, dataset.held_out]))
    for done, index in enumerate(indices, start=1):
        features.read(int(index))
        report_progress(done, len(indices))
