"""Log-probabilities of the tokens that a step commits, and of a prompt's; only in programs that are asked for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.engine.state import Models
from dflash_jax.kernels.dispatch import Implementation
from dflash_jax.kernels.packing import Packing, pack, unpack
from dflash_jax.models.lm_head import target_head
from dflash_jax.sampling import Logprobs, logprobs_of

_AT_ONCE = 64
"""Prompt tokens whose logits are in memory together."""


def written_logits(
    models: Models, hidden: Float[Array, "*tokens hidden"], top: int | None, implementation: Implementation | None
) -> Float[Array, "*tokens vocab"] | None:
    """The target's logits, if log-probabilities are wanted; `verify_hidden` then uses the same ones."""
    return None if top is None else target_head(models.target).logits(hidden, implementation=implementation)


def block_logprobs(
    logits: Float[Array, "*tokens vocab"] | None,
    tokens: Int[Array, "rows block"],
    top: int | None,
    *,
    packing: Packing | None = None,
) -> Logprobs | None:
    """Of a round's tokens: each is decided by the logits at its own place in the block.

    Args:
      logits: the target's, after the anchor and after each drafted token, packed or not.
      tokens: what the rows keep.
      top: how many of the most likely tokens to name; None computes nothing.
      packing: of logits that are packed.
    """
    if top is None:
        return None
    assert logits is not None, "log-probabilities are computed from logits"
    packed = logprobs_of(logits, pack(tokens, packing), top)
    return jax.tree.map(lambda values: unpack(values, packing), packed)


def prompt_logprobs(
    models: Models,
    hidden: Float[Array, "rows chunk hidden"],
    following: Int[Array, "rows chunk"] | None,
    top: int | None,
    implementation: Implementation | None,
) -> Logprobs | None:
    """Of the prompt's tokens that follow those of a chunk; the logits of only a few of them are ever in memory.

    Args:
      models: whose target has the head.
      hidden: the target's, of the chunk.
      following: the token after each of the chunk's.
      top: how many of the most likely tokens to name; None computes nothing.
      implementation: of the kernels; see `kernels.dispatch`.
    """
    if top is None:
        return None
    assert following is not None, "log-probabilities of a prompt need the tokens that follow"
    head, count = target_head(models.target), following.size
    pieces = -(-count // _AT_ONCE)

    def in_pieces(flat: Array) -> Array:
        padded = jnp.pad(flat, [(0, pieces * _AT_ONCE - count), *[(0, 0)] * (flat.ndim - 1)])
        return padded.reshape(pieces, _AT_ONCE, *flat.shape[1:])

    def of_piece(piece: tuple[Float[Array, "tokens hidden"], Int[Array, " tokens"]]) -> Logprobs:
        return logprobs_of(head.logits(piece[0], implementation=implementation), piece[1], top)

    flat = hidden.reshape(count, -1), jnp.maximum(following, 0).reshape(-1)
    found = jax.lax.map(of_piece, jax.tree.map(in_pieces, flat))

    def as_chunks(values: Array) -> Array:
        return values.reshape(pieces * _AT_ONCE, *values.shape[2:])[:count].reshape(*following.shape, *values.shape[2:])

    return jax.tree.map(as_chunks, found)
