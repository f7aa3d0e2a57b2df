"""`block_attention` in its simplest form: gather everything, mask, softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible(
    query_positions: Int[Array, "rows queries"],
    key_positions: Int[Array, "rows keys"],
    causal: bool,
    window: int | None,
) -> Bool[Array, "rows queries keys"]:
    """Which keys a query may look at. A window without causality reaches both ways."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = jnp.ones(distance.shape, bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= jnp.abs(distance) < window
    return seen


def block_attention(
    q: Float[Array, "rows queries heads head_dim"],
    k_block: Float[Array, "rows queries kv_heads head_dim"],
    v_block: Float[Array, "rows queries kv_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    block_table: Int[Array, "slots slot_pages"],
    idx_mapping: Int[Array, " rows"],
    context_len: Int[Array, " slots"],
    q_len: Int[Array, " rows"],
    *,
    layer: int,
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Array, "rows queries heads head_dim"]:
    """See `api.block_attention`."""
    rows, queries, heads, head_dim = q.shape
    kv_heads = k_block.shape[2]
    slots = jnp.maximum(idx_mapping, 0)
    context = jnp.where(idx_mapping >= 0, context_len[slots], 0)
    table = jnp.maximum(block_table[slots], 0)
    k = k_pages[layer][table].reshape(rows, -1, kv_heads, head_dim)
    v = v_pages[layer][table].reshape(rows, -1, kv_heads, head_dim)

    cached = jnp.broadcast_to(jnp.arange(k.shape[1]), (rows, k.shape[1]))
    block = jnp.arange(queries)
    fresh = context[:, None] + block
    seen = visible(fresh, jnp.concatenate([cached, fresh], axis=1), causal, window)
    exists = jnp.concatenate([cached < context[:, None], block < q_len[:, None]], axis=1)
    mask = seen & exists[:, None, :]

    # What no query may see may hold anything, NaN included: it must not reach a product.
    k = jnp.where(exists[:, :, None, None], jnp.concatenate([k, k_block], axis=1), 0)
    v = jnp.where(exists[:, :, None, None], jnp.concatenate([v, v_block], axis=1), 0)
    k, v = (jnp.repeat(x, heads // kv_heads, axis=2).astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (k, v))
    scores = jnp.einsum("rqhd,rkhd->rhqk", q.astype(k.dtype), k) * scale
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    live = ((idx_mapping >= 0)[:, None] & (block < q_len[:, None]))[:, None, :, None]
    scores = jnp.where(live, scores, 0)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("rhqk,rkhd->rqhd", jnp.where(live, weights, 0), v).astype(q.dtype)
