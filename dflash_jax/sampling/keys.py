"""Random draws that belong to a request and a position, never to a row or a step.

Every draw is keyed by (request's seed, absolute position of the token it decides, purpose). What a
request samples therefore does not depend on who shares its batch, and no draw serves two purposes:
reusing the proposal's draw to resample would bias the output.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32


class Purpose(enum.IntEnum):
    """What a random draw decides."""

    PROPOSE = 0
    ACCEPT = 1
    TARGET = 2


def draw_keys(
    seed: UInt32[Array, " rows"], positions: Int[Array, "rows tokens"], purpose: Int[Array, " tokens"] | Purpose
) -> Key[Array, "rows tokens"]:
    """One key for each token; the purpose is that of all of them, or one for each column."""

    def key_of(seed, position, purpose):
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.fold_in(key, position * len(Purpose) + purpose)

    purposes = jnp.broadcast_to(jnp.asarray(purpose), positions.shape[1:])
    return jax.vmap(jax.vmap(key_of, (None, 0, 0)), (0, 0, None))(seed, positions, purposes)


def uniform(
    seed: UInt32[Array, " rows"], positions: Int[Array, "rows tokens"], purpose: Int[Array, " tokens"] | Purpose
) -> Float[Array, "rows tokens"]:
    """Uniform in [0, 1), one for each token."""
    return jax.vmap(jax.vmap(jax.random.uniform))(draw_keys(seed, positions, purpose))


def gumbel(
    seed: UInt32[Array, " rows"], positions: Int[Array, "rows tokens"], purpose: Purpose, count: int
) -> Float[Array, "rows tokens count"]:
    """Standard Gumbel noise, `count` for each token."""
    draw = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (count,), jnp.float32)))
    return draw(draw_keys(seed, positions, purpose))
