"""`write_tokens` as one scatter, which is also its definition."""

from __future__ import annotations

from jaxtyping import Array, Float, Int


def write_tokens(
    pool: Float[Array, "layers pages page_size kv_heads head_dim"],
    values: Float[Array, "layers rows tokens kv_heads head_dim"],
    page: Int[Array, "rows tokens"],
    offset: Int[Array, "rows tokens"],
) -> Float[Array, "layers pages page_size kv_heads head_dim"]:
    """See `api.write_tokens`."""
    return pool.at[:, page, offset].set(values, mode="drop")
