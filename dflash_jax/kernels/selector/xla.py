"""`select_path` in plain XLA operations, which is also its definition: all edges, then a step per position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Unrolled, steps are fastest; of more positions than drafters are trained for, they would take minutes to compile.
_MOST_UNROLLED = 16


def edge_scores(
    tokens: Int[Array, "rows drafts candidates"],
    unary: Float[Array, "rows drafts candidates"],
    gate: Float[Array, "rows drafts rank"],
    anchor: Int[Array, " rows"],
    predecessor_codebook: Float[Array, "vocab rank"],
    successor_codebook: Float[Array, "vocab rank"],
) -> Float[Array, "rows drafts predecessors candidates"]:
    """The score of every candidate after every predecessor; see `api.select_path`.

    At the first position every predecessor is the anchor, later predecessor a is candidate a of the
    position before.
    """
    rows, _, top_k = tokens.shape
    anchors = jnp.broadcast_to(anchor[:, None, None], (rows, 1, top_k))
    predecessors = jnp.concatenate([anchors.astype(tokens.dtype), tokens[:, :-1]], axis=1)
    edges = jnp.einsum(
        "rlae,rlbe->rlab",
        predecessor_codebook[predecessors] * gate[:, :, None, :],
        successor_codebook[tokens],
        preferred_element_type=jnp.promote_types(gate.dtype, jnp.float32),
    )
    return edges + unary[:, :, None, :]


def walk(
    edges: Float[Array, "rows drafts predecessors candidates"],
    tokens: Int[Array, "rows drafts candidates"],
    temperature: Float[Array, " rows"],
    noise: Float[Array, "rows drafts candidates"] | None,
) -> tuple[Int[Array, "rows drafts"], Float[Array, "rows drafts candidates"]]:
    """Chooses a candidate at one position after the other, from the anchor on; see `api.select_path`."""
    rows, drafts, top_k = tokens.shape
    every_row = jnp.arange(rows)
    sampled = (temperature > 0)[:, None]
    divisor = jnp.where(sampled, temperature[:, None], 1.0)

    def step(index, position):
        scores = edges[every_row, position, index] / divisor
        drawn = scores if noise is None else jnp.where(sampled, scores + noise[:, position], scores)
        index = jnp.argmax(drawn, axis=-1).astype(jnp.int32)
        certain = jax.nn.one_hot(index, top_k, dtype=scores.dtype)
        probs = certain if noise is None else jnp.where(sampled, jax.nn.softmax(scores, axis=-1), certain)
        return index, (tokens[every_row, position, index], probs)

    index = jnp.zeros((rows,), jnp.int32)
    if drafts > _MOST_UNROLLED:
        _, (path, probs) = jax.lax.scan(step, index, jnp.arange(drafts))
        return jnp.moveaxis(path, 0, 1), jnp.moveaxis(probs, 0, 1)
    steps = []
    for position in range(drafts):
        index, chosen = step(index, position)
        steps.append(chosen)
    path, probs = zip(*steps, strict=True)
    return jnp.stack(path, axis=1), jnp.stack(probs, axis=1)


def select_path(
    tokens: Int[Array, "rows drafts candidates"],
    unary: Float[Array, "rows drafts candidates"],
    gate: Float[Array, "rows drafts rank"],
    anchor: Int[Array, " rows"],
    predecessor_codebook: Float[Array, "vocab rank"],
    successor_codebook: Float[Array, "vocab rank"],
    temperature: Float[Array, " rows"],
    noise: Float[Array, "rows drafts candidates"] | None,
) -> tuple[Int[Array, "rows drafts"], Float[Array, "rows drafts candidates"]]:
    """See `api.select_path`."""
    edges = edge_scores(tokens, unary, gate, anchor, predecessor_codebook, successor_codebook)
    return walk(edges, tokens, temperature, noise)
