"""`block_attention` in plain XLA operations, at a cost that follows the contexts' actual length.

Softmax is computed online (arXiv 1805.02867): first over the block's own keys, then over chunks of
pages in a loop that runs from the first chunk any row can see to the last any row has. On CPUs many
rows are taken in tiles of rows with contexts of like length, so that short contexts do not wait for long
ones and a tile's chunk, once gathered, is still in the processor's cache when it is multiplied.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_CHUNK_TOKENS = 128
_TILE_ROWS = 8
# On CPUs, the keys of a chunk over all rows of a tile: enough for a step of the loop to be worth it, few
# enough for a cache.
_CHUNK_KEYS, _MOST_CHUNK_TOKENS = 512, 256
_MASKED = -1e30


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
    rows = q.shape[0]
    live = idx_mapping >= 0
    slots = jnp.maximum(idx_mapping, 0)
    context = jnp.where(live, context_len[slots], 0)
    operands = (q, k_block, v_block, block_table[slots], context, jnp.where(live, q_len, 0))
    attend = functools.partial(
        _attend, k_pages=k_pages, v_pages=v_pages, layer=layer, causal=causal, window=window, scale=scale
    )
    if rows <= _TILE_ROWS or jax.default_backend() != "cpu":
        return attend(*operands)
    order = jnp.argsort(context)
    padding = -rows % _TILE_ROWS
    tiled = [jnp.pad(x[order], ((padding, 0), *((0, 0),) * (x.ndim - 1))) for x in operands]
    tiles = [x.reshape(-1, _TILE_ROWS, *x.shape[1:]) for x in tiled]
    out = jax.lax.map(lambda tile: attend(*tile), tiles)
    return out.reshape(-1, *q.shape[1:])[padding + jnp.argsort(order)]


def _attend(q, k_block, v_block, table, context, q_len, *, k_pages, v_pages, layer, causal, window, scale):
    """The operation for a few rows, of which `table` and `context` are the pages and lengths."""
    rows, queries, heads, head_dim = q.shape
    num_layers, num_pages, page_size, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    on_cpu = jax.default_backend() == "cpu"
    chunk_tokens = min(_CHUNK_KEYS // rows, _MOST_CHUNK_TOKENS) if on_cpu else _CHUNK_TOKENS
    chunk_pages = min(max(1, chunk_tokens // page_size), table.shape[1])
    chunk = chunk_pages * page_size
    offsets = jnp.arange(queries)
    positions = context[:, None] + offsets

    # Queries of one KV head lie together: [rows, kv_heads, queries * group, head_dim].
    grouped = (q.astype(jnp.float32) * scale).reshape(rows, queries, kv_heads, group, head_dim)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, queries * group, head_dim)

    def masked_scores(keys, key_positions, exists):
        scores = jnp.einsum("rkqd,rskd->rkqs", grouped, keys.astype(jnp.float32))
        distance = positions[:, :, None] - key_positions[:, None, :]
        seen = jnp.broadcast_to(exists[:, None, :], distance.shape)
        if causal:
            seen &= distance >= 0
        if window is not None:
            seen &= jnp.abs(distance) < window
        seen = jnp.repeat(seen, group, axis=1)[:, None]
        return jnp.where(seen, scores, _MASKED)

    def weighted_sum(weights, values, exists):
        # Weight 0 is no protection: what does not exist may be NaN.
        values = jnp.where(exists[..., None, None], values, 0).astype(jnp.float32)
        return jnp.einsum("rkqs,rskd->rkqd", weights, values)

    fresh = offsets < q_len[:, None]
    scores = masked_scores(k_block, positions, fresh)
    top = scores.max(-1)
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1)
    mixed = weighted_sum(weights, v_block, fresh)

    flat_k = k_pages.reshape(num_layers * num_pages, page_size, kv_heads, head_dim)
    flat_v = v_pages.reshape(num_layers * num_pages, page_size, kv_heads, head_dim)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % chunk_pages)), constant_values=-1)

    def step(index, carry):
        top, total, mixed = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * chunk_pages, chunk_pages, axis=1)
        pages = layer * num_pages + jnp.clip(pages, 0, num_pages - 1)
        key_positions = jnp.broadcast_to(index * chunk + jnp.arange(chunk), (rows, chunk))
        exists = key_positions < context[:, None]
        keys = flat_k[pages].reshape(rows, chunk, kv_heads, head_dim)
        values = flat_v[pages].reshape(rows, chunk, kv_heads, head_dim)
        scores = masked_scores(keys, key_positions, exists)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + weighted_sum(weights, values, exists)
        return new_top, total, mixed

    last = -(-jnp.max(context) // chunk)
    if window is None:
        first = jnp.zeros_like(last)
    else:
        reach = jnp.where(context > 0, context - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.minimum(jnp.maximum(jnp.min(reach), 0) // chunk, last)
    _, total, mixed = jax.lax.fori_loop(first, last, step, (top, total, mixed))

    out = (mixed / total[..., None]).reshape(rows, kv_heads, queries, group, head_dim)
    out = out.transpose(0, 2, 1, 3, 4).reshape(rows, queries, heads, head_dim)
    return jnp.where(fresh[..., None, None], out, 0).astype(q.dtype)
