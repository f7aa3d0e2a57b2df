"""A small target trained from nothing by next-token prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, Key, PyTree

from dflash_jax.checkpoints.hf_config import target_config
from dflash_jax.compile_cache import enable_compile_cache
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import TargetConfig
from dflash_jax.models.matrix import Matrix
from dflash_jax.models.target import lm_head
from dflash_jax.models.weights import TargetParams
from dflash_jax.progress import Bar
from dflash_jax.signals import Stop
from dflash_jax.training.config import PretrainSection, TargetShape
from dflash_jax.training.data.batch import TokenBatch, token_batch
from dflash_jax.training.data.dataset import Dataset, Order
from dflash_jax.training.data.features import run_sequences
from dflash_jax.training.drafts.init import check_num_weights, fresh_norm, random_layer
from dflash_jax.training.optimiser import make_optimiser

_EVALUATED = 64
_NOTED_EVERY = 10


@struct.dataclass
class Prediction:
    """How well next tokens were predicted.

    Attributes:
      nll: sum of the negative log-likelihoods of the tokens that are learnt, those after prompts.
      correct: how many of them were the most likely token.
      tokens: how many they are.
    """

    nll: Float[Array, ""]
    correct: Int[Array, ""]
    tokens: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A trained target.

    Attributes:
      config, params: the target, float32.
      loss, accuracy: on held-out sequences, or on those of the last step if none are held out.
    """

    config: TargetConfig
    params: TargetParams
    loss: float
    accuracy: float


def fresh_target_config(shape: TargetShape) -> TargetConfig:
    """The config of a Qwen3, or Qwen3.5, of these sizes.

    Raises:
      ConfigError: sizes that contradict each other, or tokens outside the vocabulary.
    """
    for name in ("eos_token_id", "bos_token_id"):
        token = getattr(shape, name)
        if token is not None and not 0 <= token < shape.vocab_size:
            raise ConfigError(f"pretrain.shape.{name} {token} is outside pretrain.shape.vocab_size {shape.vocab_size}")
    fields = {"use_sliding_window": False, **shape.model_dump(exclude={"gated_delta"})}
    fields["architectures"] = ["Qwen3ForCausalLM"]
    if shape.gated_delta is not None:
        fields |= {"architectures": ["Qwen3_5ForCausalLM"], **shape.gated_delta.model_dump()}
    return target_config(fields, source="pretrain.shape")


def fresh_target_params(key: Key[Array, ""], config: TargetConfig, scale: float) -> TargetParams:
    """Fresh weights, float32: embeddings of unit variance, matrices of standard deviation scale / sqrt(inputs)."""
    keys = jax.random.split(key, config.num_layers + 2)
    shape = (config.vocab_size, config.hidden_size)
    head = jax.random.normal(keys[1], shape[::-1]) * (scale / config.hidden_size**0.5)
    return TargetParams(
        embedding=jax.random.normal(keys[0], shape) * (scale if config.tied_embeddings else 1.0),
        layers=tuple(random_layer(key, config, scale, kind) for key, kind in zip(keys[2:], config.layers, strict=True)),
        norm=fresh_norm(config, config.hidden_size),
        lm_head=None if config.tied_embeddings else Matrix(head),
    )


def predict(params: TargetParams, config: TargetConfig, batch: TokenBatch) -> Prediction:
    """Cross-entropy of every token after a prompt, given all before it."""
    # The other implementations have loops of a length known only at run time, which cannot be differentiated.
    run = run_sequences(params, config, batch.tokens, implementation="reference")
    logits = lm_head(params, run.hidden[:, :-1], implementation="reference")
    labels = batch.tokens[:, 1:]
    positions = jnp.arange(1, batch.tokens.shape[1])
    learnt = (positions >= batch.prompt_lens[:, None]) & (positions < batch.seq_lens[:, None])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = (jnp.argmax(logits, -1) == labels) & learnt
    return Prediction(jnp.sum(nll * learnt), jnp.sum(correct), jnp.sum(learnt))


def pretrain(section: PretrainSection, dataset: Dataset, seed: int, stop: Stop | None = None) -> Pretrained:
    """Trains a fresh target on a dataset's sequences. It depends on the first three arguments alone.

    Args:
      section: the target and how it is trained.
      dataset: its sequences.
      seed: of its fresh weights and of the order of the sequences.
      stop: ends it after the current step when it becomes true.

    Raises:
      ConfigError: sizes that contradict each other.
      Stopped: `stop` became true.
    """
    stop = Stop() if stop is None else stop
    enable_compile_cache()
    config = fresh_target_config(section.shape)

    def fresh() -> TargetParams:
        return fresh_target_params(jax.random.fold_in(jax.random.key(seed), 3), config, section.scale)

    check_num_weights("pretrain.shape", fresh)
    steps = section.optimiser.steps
    with Bar("pre-training", steps) as bar:
        bar.doing("making fresh weights")
        params = fresh()
        optimiser = make_optimiser(section.optimiser)
        state = optimiser.init(params)
        step = _make_step(config, optimiser)
        order = Order(dataset, seed, section.optimiser.sequences)
        for number in range(steps):
            stop.check(f" at step {number} of {steps} of pre-training, which the same command begins anew")
            params, state, prediction = step(params, state, _batch(dataset, order.sequences(number)))
            noted = number % _NOTED_EVERY == 0
            bar.at(number + 1, "loss {:.3f}, accuracy {:.3f}".format(*_means(prediction)) if noted else None)
    chosen = [int(index) for index in dataset.held_out[:_EVALUATED]]
    if chosen:
        prediction = jax.jit(predict, static_argnums=1)(params, config, _batch(dataset, chosen))
    return Pretrained(config, params, *_means(prediction))


def _make_step(config: TargetConfig, optimiser: optax.GradientTransformation) -> Callable:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: TargetParams, state: PyTree, batch: TokenBatch):
        def loss(params):
            prediction = predict(params, config, batch)
            return prediction.nll / jnp.maximum(prediction.tokens, 1), prediction

        (_, prediction), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, prediction

    return step


def _batch(dataset: Dataset, indices: list[int]) -> TokenBatch:
    return token_batch([dataset.sequence(index) for index in indices], dataset.max_length)


def _means(prediction: Prediction) -> tuple[float, float]:
    """Loss and accuracy."""
    tokens = max(int(prediction.tokens), 1)
    return round(float(prediction.nll) / tokens, 4), round(int(prediction.correct) / tokens, 4)
