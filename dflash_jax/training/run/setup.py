"""The setup of a run: target, data, features and starting draft, loaded and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax.checkpoints import LoadedTarget, load_target
from dflash_jax.compile_cache import enable_compile_cache
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.weights import DraftParams
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data.batch import Batch, pad, token_batch
from dflash_jax.training.data.dataset import Dataset, Order, open_data
from dflash_jax.training.data.feature_cache import CachedFeatures, Features
from dflash_jax.training.data.features import FeatureExtractor, fingerprint
from dflash_jax.training.drafts.feature_scale import feature_scale, num_features, scale_features, unscale_features
from dflash_jax.training.drafts.init import check_num_weights, fresh_params
from dflash_jax.training.drafts.start import check_mask_token, starting_draft
from dflash_jax.training.objective.sampled_softmax import SubsetPlan, plan_subset
from dflash_jax.training.objective.shared_weights import SharedWeights, shared_weights
from dflash_jax.training.optimiser import make_optimiser
from dflash_jax.training.run.checks import check_draft, check_shapes
from dflash_jax.training.run.state import TrainState, initial_state
from dflash_jax.training.run.store import RunStore


@dataclasses.dataclass(frozen=True)
class Run:
    """The constants of a run, and its first state.

    Attributes:
      config: the run.
      target: the model it drafts for.
      draft_config: the draft.
      dataset, features: its sequences, and the target's hidden states over them.
      shared: the target's embedding and LM head.
      plan: the tokens that steps draw their softmax from.
      scale: features are divided by it.
      start: the state before the first step.
    """

    config: TrainConfig
    target: LoadedTarget
    draft_config: DraftConfig
    dataset: Dataset
    features: Features
    shared: SharedWeights
    plan: SubsetPlan
    scale: Float[Array, " features"]
    start: TrainState

    def batch(self, indices: list[int]) -> Batch:
        """Sequences and their features, padded."""
        length = self.dataset.max_length
        of_tokens = token_batch([self.dataset.sequence(index) for index in indices], length)
        states = [self.features.read(index) for index in indices]
        features, final = np.split(pad(states, length, states[0].dtype), [len(self.scale)], axis=-1)
        return Batch(
            tokens=of_tokens.tokens,
            prompt_lens=of_tokens.prompt_lens,
            seq_lens=of_tokens.seq_lens,
            features=jnp.asarray(features),
            final=None if self.config.loss.soft == 0 else jnp.asarray(final),
        )

    def export(self, params: DraftParams) -> DraftParams:
        """Weights of a state as those of a draft for raw features."""
        return unscale_features(params, self.scale)


def prepare(config: TrainConfig, store: RunStore, report: Callable[[str], None] = lambda what: None) -> Run:
    """Loads and checks everything that a config names.

    Args:
      config: the run.
      store: where it is kept.
      report: is told what is being done.

    Raises:
      ConfigError: a config that cannot work, or not the one that the run was started with.
      CheckpointError: a target or draft that cannot be read.
    """
    check_shapes(config)
    enable_compile_cache()
    report(f"loading {config.target}")
    target = load_target(config.target, "float32")
    report(f"opening {config.data.path}")
    dataset = open_data(config.data, target.config.vocab_size)
    report("making the draft" if config.draft.path is None else f"loading {config.draft.path}")
    start, draft_config = starting_draft(config, target)
    key = jax.random.key(config.seed)

    def fresh() -> DraftParams:
        return fresh_params(jax.random.fold_in(key, 1), draft_config, config.init, target.params, target.config)

    if start is None:
        check_num_weights("the draft", fresh)
    check_mask_token(draft_config.mask_token_id, target.config, dataset)
    loss = config.loss
    plan = plan_subset(dataset.token_counts, unseen=loss.unseen, frequent=loss.frequent, drawn=loss.drawn)
    check_draft(config, draft_config, target.config, dataset, plan)
    dependencies = dependencies_of(config, target, start, draft_config)
    store.begin(config, {**dependencies, "data fingerprint": dataset.fingerprint})
    features = _open_features(config, target, draft_config, dataset, dependencies["target fingerprint"])
    if store.latest_step() is None:
        report("measuring features")
        store.save_scale(_measure_scale(config, draft_config, dataset, features))
    scale = jnp.asarray(store.load_scale(num_features(draft_config)))
    params = fresh() if start is None else scale_features(start, scale)
    state = initial_state(params, make_optimiser(config.optimiser, config.dtype), jax.random.fold_in(key, 2))
    shared = shared_weights(target.params, config.dtype)
    return Run(config, target, draft_config, dataset, features, shared, plan, scale, state)


def dependencies_of(
    config: TrainConfig, target: LoadedTarget, start: DraftParams | None, draft_config: DraftConfig
) -> dict[str, Any]:
    """What the weights depend on beside the run's settings and its data.

    Args:
      config: the run.
      target: its target.
      start, draft_config: as `starting_draft` gives them.
    """
    found: dict[str, Any] = {
        "target fingerprint": fingerprint(target.params, target.config),
        # Features are rounded to bfloat16 only where they are cached.
        "features in bfloat16": config.data.features is not None,
    }
    if start is not None:
        found["draft fingerprint"] = fingerprint(start, draft_config)
    return found


def _open_features(
    config: TrainConfig, target: LoadedTarget, draft: DraftConfig, dataset: Dataset, target_fingerprint: str
) -> Features:
    extractor = FeatureExtractor(target.params, target.config, config.dtype)
    layers = draft.target_layer_ids
    if config.loss.soft:
        layers = (*layers, target.config.num_layers - 1)
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
    width = num_features(draft)
    if config.init.fc == "plain" and config.draft.path is None:
        return np.ones(width, np.float32)
    chosen = Order(dataset, config.seed, config.init.feature_sequences).sequences(0)
    return feature_scale([features.read(index)[:, :width] for index in chosen])


def build_features(config: TrainConfig, report_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Computes and caches the features of all sequences of a run.

    Args:
      config: the run; its `data.features` says where to.
      report_progress: called with the sequences done and their number.

    Raises:
      ConfigError: no `data.features`, or one that belongs to something else.
    """
    if config.data.features is None:
        raise ConfigError("data.features is missing; it must name the directory for the computed features")
    enable_compile_cache()
    target = load_target(config.target, "float32")
    dataset = open_data(config.data, target.config.vocab_size)
    _, draft_config = starting_draft(config, target)
    features = _open_features(config, target, draft_config, dataset, fingerprint(target.params, target.config))
    indices = np.sort(np.concatenate([dataset.train, dataset.held_out]))
    for done, index in enumerate(indices, start=1):
        features.read(int(index))
        report_progress(done, len(indices))
