"""The one attention op of the engine, dispatched to its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation, choose


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
    implementation: Implementation | None = None,
) -> Float[Array, "rows queries heads head_dim"]:
    """Attention of each row's new tokens over its slot's cached context and over themselves.

    Row r belongs to slot `idx_mapping[r]`; its context is positions [0, context_len[slot]) found
    through `block_table[slot]`, and its i-th new token stands at position context_len[slot] + i.
    The mapping is resolved in here, so a caller cannot hand over a context that was gathered for
    another row.

    Args:
      q: queries of the new tokens, rotated.
      k_block, v_block: keys and values of the same tokens, not in the pages.
      k_pages, v_pages: the page pools, read only.
      block_table: physical page of each slot's logical page; negative where there is none.
      idx_mapping: row to slot; negative for an empty row.
      context_len: cached tokens per slot.
      q_len: new tokens per row, 0..queries; the rest is padding.
      layer: which layer's pages to read.
      causal: whether a query sees only keys at or before it.
      window: keys further than this from the query (|query - key| >= window) are not seen; with
        causal False the window reaches both ways. 1 or more; None for no limit.
      scale: multiplies the scores.
      implementation: overrides what the platform decides; see `kernels.dispatch`. To be differentiated, it must
        be "reference".

    Returns:
      Mixed values, in q's dtype; zeros at empty rows and padding.
    """
    compute = choose("block_attention", implementation, q, k_block, v_block, k_pages, v_pages).compute
    return compute(
        q,
        k_block,
        v_block,
        k_pages,
        v_pages,
        block_table,
        idx_mapping,
        context_len,
        q_len,
        layer=layer,
        causal=causal,
        window=window,
        scale=scale,
    )
