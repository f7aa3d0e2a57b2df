"""Attention of many blocks of a sequence, each to the context before its own anchor and to itself.

The scores of all blocks are never in memory together. Blocks are computed in chunks, a chunk reads the context only
up to its last anchor, and the backward pass computes a chunk's scores again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_CHUNK_BLOCKS = 32
_CONTEXT_STEP = 128
_MASKED = -1e30


def anchored_attention(
    q: Float[Array, "sequences anchors block heads head_dim"],
    k_block: Float[Array, "sequences anchors block kv_heads head_dim"],
    v_block: Float[Array, "sequences anchors block kv_heads head_dim"],
    k_context: Float[Array, "sequences length kv_heads head_dim"],
    v_context: Float[Array, "sequences length kv_heads head_dim"],
    anchors: Int[Array, "sequences anchors"],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Array, "sequences anchors block heads head_dim"]:
    """`block_attention` where each block's context is the sequence before its anchor.

    Args:
      q: queries of the blocks, rotated; block n is at positions anchors[n], anchors[n] + 1, ...
      k_block, v_block: keys and values of the blocks.
      k_context, v_context: keys and values of the sequence's tokens.
      anchors: position of each block's first token; ascending ones make it faster.
      causal, window, scale: see `block_attention`.
    """
    count = anchors.shape[1]
    chunk = next(size for size in range(min(_CHUNK_BLOCKS, count), 0, -1) if count % size == 0)

    def sequence(args):
        *blocks, k_context, v_context = args
        chunks = [x.reshape(count // chunk, chunk, *x.shape[1:]) for x in blocks]
        out = jax.lax.map(lambda c: _chunk_attention(causal, window, scale, *c, k_context, v_context), tuple(chunks))
        return out.reshape(count, *out.shape[2:])

    return jax.lax.map(sequence, (anchors, q, k_block, v_block, k_context, v_context))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunk_attention(causal, window, scale, anchors, q, k_block, v_block, k_context, v_context):
    branches = [
        lambda *args, bound=bound: _attend(causal, window, scale, bound, anchors, *args)
        for bound in _bounds(k_context.shape[0])
    ]
    return jax.lax.switch(_bound_index(anchors, len(branches)), branches, q, k_block, v_block, k_context, v_context)


def _forward(causal, window, scale, anchors, *tensors):
    return _chunk_attention(causal, window, scale, anchors, *tensors), (anchors, tensors)


def _backward(causal, window, scale, residuals, gradient):
    anchors, tensors = residuals

    def pull_back(bound, gradient, *tensors):
        return jax.vjp(lambda *args: _attend(causal, window, scale, bound, anchors, *args), *tensors)[1](gradient)

    branches = [functools.partial(pull_back, bound) for bound in _bounds(tensors[-1].shape[0])]
    gradients = jax.lax.switch(_bound_index(anchors, len(branches)), branches, gradient, *tensors)
    return np.zeros(anchors.shape, jax.dtypes.float0), *gradients


_chunk_attention.defvjp(_forward, _backward)


def _bounds(length: int) -> list[int]:
    return [*range(_CONTEXT_STEP, length, _CONTEXT_STEP), length]


def _bound_index(anchors: Int[Array, " anchors"], bounds: int) -> Int[Array, ""]:
    return jnp.clip((jnp.max(anchors) - 1) // _CONTEXT_STEP, 0, bounds - 1)


def _attend(
    causal: bool,
    window: int | None,
    scale: float,
    bound: int,
    anchors: Int[Array, " anchors"],
    q: Float[Array, "anchors block heads head_dim"],
    k_block: Float[Array, "anchors block kv_heads head_dim"],
    v_block: Float[Array, "anchors block kv_heads head_dim"],
    k_context: Float[Array, "length kv_heads head_dim"],
    v_context: Float[Array, "length kv_heads head_dim"],
) -> Float[Array, "anchors block heads head_dim"]:
    """One softmax over the context's first `bound` tokens and the block."""
    count, block, heads, head_dim = q.shape
    kv_heads = k_block.shape[2]
    grouped = (q.astype(jnp.float32) * scale).reshape(count, block, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(2, 0, 1, 3, 4)
    k_context, v_context = (x[:bound].astype(jnp.float32) for x in (k_context, v_context))

    offsets = jnp.arange(block)
    positions = anchors[:, None] + offsets
    past = jnp.broadcast_to(jnp.arange(bound) < anchors[:, None, None], (count, block, bound))
    own = jnp.ones((block, block), bool)
    if causal:
        own &= offsets[:, None] >= offsets
    if window is not None:
        past &= positions[..., None] - jnp.arange(bound) < window
        own &= jnp.abs(offsets[:, None] - offsets) < window

    context_scores = jnp.einsum("kabgd,lkd->kabgl", grouped, k_context)
    block_scores = jnp.einsum("kabgd,ackd->kabgc", grouped, k_block.astype(jnp.float32))
    context_scores = jnp.where(past[None, :, :, None, :], context_scores, _MASKED)
    block_scores = jnp.where(own[:, None, :], block_scores, _MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(context_scores.max(-1), block_scores.max(-1))[..., None])
    context_weights, block_weights = jnp.exp(context_scores - top), jnp.exp(block_scores - top)
    mixed = jnp.einsum("kabgl,lkd->kabgd", context_weights, v_context)
    mixed += jnp.einsum("kabgc,ackd->kabgd", block_weights, v_block.astype(jnp.float32))
    total = context_weights.sum(-1) + block_weights.sum(-1)
    mixed /= total[..., None]
    return mixed.transpose(1, 2, 0, 3, 4).reshape(q.shape).astype(q.dtype)
