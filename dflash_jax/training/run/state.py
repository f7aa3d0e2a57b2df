"""The state of a training run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int, Key, PyTree, UInt32

from dflash_jax.models.weights import DraftParams


@struct.dataclass
class TrainState:
    """A run between two steps. With the config it determines every later step.

    Attributes:
      params: the draft's weights, float32, for scaled features.
      optimiser: the optimiser's state.
      step: steps taken.
      key: random key of the run, as its data; a step's key is folded from it and the step.
    """

    params: DraftParams
    optimiser: PyTree
    step: Int[Array, ""]
    key: UInt32[Array, " words"]

    def step_key(self) -> Key[Array, ""]:
        """Random key of the next step."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key), self.step)


def initial_state(params: DraftParams, optimiser: optax.GradientTransformation, key: Key[Array, ""]) -> TrainState:
    """The state before the first step. It shares no array with `params`, since steps donate it."""
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(params, optimiser.init(params), jnp.zeros((), jnp.int32), jax.random.key_data(key))
