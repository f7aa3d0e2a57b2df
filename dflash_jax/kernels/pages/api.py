"""The page write as one op, dispatched to its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from dflash_jax.kernels.dispatch import Implementation, choose


def write_tokens(
    pool: Float[Array, "layers pages page_size kv_heads head_dim"],
    values: Float[Array, "layers rows tokens kv_heads head_dim"],
    page: Int[Array, "rows tokens"],
    offset: Int[Array, "rows tokens"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "layers pages page_size kv_heads head_dim"]:
    """The pool with each token's values, rounded to its dtype, at its place; in the same memory if it is donated.

    Args:
      pool: of all layers.
      values: of the tokens.
      page: where each belongs; a token whose page the pool does not have is dropped.
      offset: the place in the page.
      implementation: overrides what the platform decides; see `kernels.dispatch`.
    """
    return choose("write_tokens", implementation, pool).compute(pool, values.astype(pool.dtype), page, offset)
