"""The LM head's and the selector's kernels on a GPU: right, and how long next to what XLA makes of the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from published_shapes import DRAFT, DRAFTS, TARGET

from dflash_jax.kernels import mosaic
from dflash_jax.kernels.lm_head import best_tokens, head_logits
from dflash_jax.kernels.selector import select_path
from dflash_jax.kernels.selector.xla import edge_scores

Seconds = Callable[[Callable[[], Any]], float]


def check_and_time(small: bool, seconds: Seconds, over: Callable[[], bool]) -> list[dict[str, Any]]:
    """One entry per op and number of rows: the largest error, and the milliseconds of both implementations."""
    results = []
    for rows in [2] if small else [8, 32, 1]:
        for op in (_draft_head, _target_head, _selector):
            if not over():
                results.append(op(rows, small, seconds))
    return results


def _head(rows: int, top_k: int, name: str, small: bool, seconds: Seconds) -> dict[str, Any]:
    vocab, depth = (264, 64) if small else (TARGET.vocab_size, TARGET.hidden_size)
    keys = jax.random.split(jax.random.key(rows), 2)
    hidden = jax.random.normal(keys[0], (rows, depth), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (depth, vocab), jnp.bfloat16) * depth**-0.5
    best = functools.partial(best_tokens, layout="in_out", top_k=top_k)
    calls = _jitted(best, small, hidden, weight)
    values, ids = (np.asarray(x) for x in calls["mosaic_gpu"]())
    # In float32: the whole head in float64 would take longer than all the rest.
    with jax.default_matmul_precision("highest"):
        logits = head_logits(hidden.astype(jnp.float32), weight.astype(jnp.float32), layout="in_out")
        expected = np.asarray(jax.lax.top_k(logits, top_k)[0])
        named = np.asarray(jnp.take_along_axis(logits, jnp.asarray(ids), axis=-1))
    error = max(float(np.abs(values - expected).max()), float(np.abs(values - named).max()))
    return _entry(name, rows, error, calls, seconds)


def _draft_head(rows: int, small: bool, seconds: Seconds) -> dict[str, Any]:
    assert DRAFT.selector is not None
    return _head(rows * DRAFTS, DRAFT.selector.top_k, "draft's head", small, seconds)


def _target_head(rows: int, small: bool, seconds: Seconds) -> dict[str, Any]:
    return _head(rows * (1 + DRAFTS), 1, "target's head", small, seconds)


def _selector(rows: int, small: bool, seconds: Seconds) -> dict[str, Any]:
    assert DRAFT.selector is not None
    vocab, rank = (64, 64) if small else (DRAFT.vocab_size, DRAFT.selector.rank)
    keys = jax.random.split(jax.random.key(rows), 7)
    shape = (rows, DRAFTS, DRAFT.selector.top_k)

    def codes(key, *dimensions):
        return jax.random.normal(key, (*dimensions, rank), jnp.bfloat16) * rank**-0.25

    # Distinct within a position, as candidates are.
    tokens = jax.random.randint(keys[0], shape[:2], 0, vocab)[..., None] + jnp.arange(shape[2])
    scored = {
        "tokens": (tokens % vocab).astype(jnp.int32),
        "unary": jax.random.normal(keys[1], shape),
        "gate": codes(keys[2], rows, DRAFTS),
        "anchor": jax.random.randint(keys[3], (rows,), 0, vocab),
        "predecessor_codebook": codes(keys[4], vocab),
        "successor_codebook": codes(keys[5], vocab),
    }
    noise = jax.random.gumbel(keys[6], shape)
    calls = _jitted(select_path, small, *scored.values(), jnp.zeros(rows), noise)
    path, _ = (np.asarray(x) for x in calls["mosaic_gpu"]())
    with jax.default_matmul_precision("highest"):
        edges = np.asarray(
            edge_scores(**{n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in scored.items()})
        )
    error, candidates = 0.0, np.asarray(scored["tokens"])
    for row in range(rows):
        before = 0
        for position in range(DRAFTS):
            scores = edges[row, position, before]
            before = int(np.argmax(candidates[row, position] == path[row, position]))
            error = max(error, float(scores.max() - scores[before]))
    return _entry("selector", rows, error, calls, seconds)


def _jitted(op, small: bool, *arguments) -> dict[str, Callable[[], Any]]:
    """A call of each implementation; the kernel's is simulated where there is no GPU."""

    def call(implementation):
        compiled = jax.jit(functools.partial(op, implementation=implementation))

        def run():
            with mosaic.simulated() if small and implementation == "mosaic_gpu" else contextlib.nullcontext():
                return jax.block_until_ready(compiled(*arguments))

        return run

    return {implementation: call(implementation) for implementation in ("mosaic_gpu", "xla")}


def _entry(name: str, rows: int, error: float, calls, seconds: Seconds) -> dict[str, Any]:
    times = {f"{implementation}_ms": 1e3 * seconds(call) for implementation, call in calls.items()}
    return {"op": name, "rows": rows, "error": error, "ok": error <= 2e-2, **times}
