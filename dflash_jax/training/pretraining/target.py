"""A small target from scratch, by next-token prediction, for where there is none to draft for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float, Int, Key, PyTree

from dflash_jax.checkpoints.hf_config import target_config
from dflash_jax.errors import ConfigError
from dflash_jax.models.config import TargetConfig
from dflash_jax.models.target import lm_head
from dflash_jax.models.weights import TargetParams
from dflash_jax.progress import Bar
from dflash_jax.training.config import PretrainSection, TargetShape
from dflash_jax.training.data.dataset import Dataset, Order
from dflash_jax.training.data.features import run_sequences
from dflash_jax.training.drafts.init import drawn_layer
from dflash_jax.training.optimiser import make_optimiser

_JUDGED = 64
_NOTED_EVERY = 10


@struct.dataclass
class Texts:
    """Sequences to predict, padded to one length.

    Attributes:
      tokens: anything past a sequence's end.
      prompt_lens: tokens at the start that are not learnt.
      lengths: tokens of each sequence.
    """

    tokens: Int[Array, "sequences length"]
    prompt_lens: Int[Array, " sequences"]
    lengths: Int[Array, " sequences"]


@struct.dataclass
class Prediction:
    """How well next tokens were predicted: sums over the tokens that are learnt, and their number."""

    nll: Float[Array, ""]
    right: Int[Array, ""]
    count: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A target and how it does.

    Attributes:
      config, params: the target, float32.
      loss, accuracy: on held-out sequences, or on those of the last step if none are held out.
    """

    config: TargetConfig
    params: TargetParams
    loss: float
    accuracy: float


def fresh_target_config(shape: TargetShape) -> TargetConfig:
    """The config of a Qwen3 of these sizes.

    Raises:
      ConfigError: sizes that contradict each other, or tokens outside the vocabulary.
    """
    for name in ("eos_token_id", "bos_token_id"):
        token = getattr(shape, name)
        if token is not None and not 0 <= token < shape.vocab_size:
            raise ConfigError(f"pretrain.shape.{name} {token} is outside pretrain.shape.vocab_size {shape.vocab_size}")
    fields = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, **shape.model_dump()}
    return target_config(fields, source="pretrain.shape")


def fresh_target_params(key: Key[Array, ""], config: TargetConfig, scale: float) -> TargetParams:
    """Fresh weights, float32: embeddings of unit variance, matrices of standard deviation scale / sqrt(inputs)."""
    keys = jax.random.split(key, config.num_layers + 2)
    shape = (config.vocab_size, config.hidden_size)
    head = jax.random.normal(keys[1], shape[::-1]) * (scale / config.hidden_size**0.5)
    return TargetParams(
        embedding=jax.random.normal(keys[0], shape) * (scale if config.tied_embeddings else 1.0),
        layers=tuple(drawn_layer(key, config, scale) for key in keys[2:]),
        norm=jnp.ones(config.hidden_size),
        lm_head=None if config.tied_embeddings else head,
    )


def predict(params: TargetParams, config: TargetConfig, texts: Texts) -> Prediction:
    """Cross-entropy of every token after a prompt, given all before it."""
    # The other implementations have loops of a length known only at run time, which cannot be differentiated.
    run = run_sequences(params, config, texts.tokens, implementation="reference")
    logits = lm_head(params, run.hidden[:, :-1])
    labels = texts.tokens[:, 1:]
    places = jnp.arange(1, texts.tokens.shape[1])
    learnt = (places >= texts.prompt_lens[:, None]) & (places < texts.lengths[:, None])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (jnp.argmax(logits, -1) == labels) & learnt
    return Prediction(jnp.sum(nll * learnt), jnp.sum(right), jnp.sum(learnt))


def pretrain(section: PretrainSection, dataset: Dataset, seed: int) -> Pretrained:
    """Trains a fresh target on a dataset's sequences. It depends on the arguments alone.

    Raises:
      ConfigError: sizes that contradict each other.
    """
    config = fresh_target_config(section.shape)
    params = fresh_target_params(jax.random.fold_in(jax.random.key(seed), 3), config, section.scale)
    optimiser = make_optimiser(section.optimiser)
    state = optimiser.init(params)
    step = _make_step(config, optimiser)
    order = Order(dataset, seed, section.optimiser.sequences)
    with Bar("pre-training", section.optimiser.steps) as bar:
        for number in range(section.optimiser.steps):
            params, state, seen = step(params, state, _texts(dataset, order.sequences(number)))
            noted = number % _NOTED_EVERY == 0
            bar.at(number + 1, "loss {:.3f}, accuracy {:.3f}".format(*_figures(seen)) if noted else None)
    chosen = [int(index) for index in dataset.held_out[:_JUDGED]]
    if chosen:
        seen = jax.jit(predict, static_argnums=1)(params, config, _texts(dataset, chosen))
    return Pretrained(config, params, *_figures(seen))


def _make_step(config: TargetConfig, optimiser: optax.GradientTransformation) -> Callable:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: TargetParams, state: PyTree, texts: Texts):
        def loss(params):
            seen = predict(params, config, texts)
            return seen.nll / jnp.maximum(seen.count, 1), seen

        (_, seen), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, seen

    return step


def _texts(dataset: Dataset, indices: list[int]) -> Texts:
    sequences = [dataset.sequence(index) for index in indices]
    tokens = np.zeros((len(sequences), dataset.max_length), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
    prompt_lens = np.asarray([sequence.prompt_len for sequence in sequences], np.int32)
    lengths = np.asarray([len(sequence.tokens) for sequence in sequences], np.int32)
    return Texts(jnp.asarray(tokens), jnp.asarray(prompt_lens), jnp.asarray(lengths))


def _figures(seen: Prediction) -> tuple[float, float]:
    count = max(int(seen.count), 1)
    return round(float(seen.nll) / count, 4), round(int(seen.right) / count, 4)
