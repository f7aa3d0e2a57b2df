"""The one attention op of the engine, and the choice of what computes it."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from dflash_jax.kernels.block_attention import pallas, reference, xla

Implementation = Literal["reference", "xla", "pallas"]

_IMPLEMENTATIONS = {
    "reference": reference.block_attention,
    "xla": xla.block_attention,
    "pallas": pallas.block_attention,
}

_log = logging.getLogger(__name__)


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
        causal False the window reaches both ways. None for no limit.
      scale: multiplies the scores.
      implementation: "reference", "xla" or "pallas"; by default "pallas" on Hopper GPUs and "xla"
        elsewhere. Where "pallas" does not do a shape, "xla" computes it and the log says why.

    Returns:
      Mixed values, in q's dtype; zeros at empty rows and padding.
    """
    implementation = implementation or _default()
    if implementation == "pallas" and (reason := pallas.unsupported(q, k_block, k_pages)):
        _log_once(f"block_attention falls back from pallas to xla: {reason}")
        implementation = "xla"
    compute = _IMPLEMENTATIONS[implementation]
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


def _default() -> Implementation:
    """The fastest for the default backend, which is what a computation runs on unless it is told otherwise."""
    if jax.default_backend() != "gpu":
        return "xla"
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability == "9.0":
        return "pallas"
    _log_once(
        f"block_attention uses xla: its pallas kernel is for compute capability 9.0 (Hopper), "
        f"and {device.device_kind} has {capability}"
    )
    return "xla"


@functools.cache
def _log_once(sentence: str) -> None:
    _log.warning(sentence)
