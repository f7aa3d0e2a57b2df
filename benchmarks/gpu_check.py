"""Checks and times the engine's GPU path on a real GPU, in one command of under eight minutes.

    python benchmarks/gpu_check.py --out check.json

Weights are random, in the shapes of Qwen3-8B and a five-layer DFlash 2 drafter, so nothing is
downloaded; it takes about 60 GB of GPU memory. In this order, until the time is up:

- correctness: the attention kernel against the reference in float64;
- the kernels of the LM head and the selector: correctness, and time next to XLA's;
- the bandwidth of a large copy, and what attention reaches of it;
- a round's time, over the time to read the weights once, and over a plain decoding step.

It prints one table, last, and writes the same as JSON. `--tiny` runs all of it on a CPU in small
shapes, which shows that the script works and measures nothing; the kernels are then simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_ops import check_and_time
from published_shapes import DRAFT, DRAFTS, TARGET, models_with, tiny

from dflash_jax.engine.state import EngineState, Models, init_state
from dflash_jax.engine.steps import run_rounds
from dflash_jax.kernels import mosaic
from dflash_jax.kernels.block_attention import block_attention

PAGE_SIZE = 64


@dataclasses.dataclass
class Clock:
    """How long there is."""

    budget: float
    start: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return time.monotonic() - self.start > self.budget


def seconds(call, repeats: int = 5) -> float:
    """Median time of a call that has run before; `call` returns what to wait for."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def attention_arguments(
    key, *, layers, rows, queries, heads, kv_heads, head_dim, page_size, contexts, dtype
) -> dict[str, jax.Array]:
    """Random arguments: row r belongs to slot rows - 1 - r, whose pages are scattered over the pool."""
    slot_pages = -(-max(max(contexts), 1) // page_size)
    pages = rows * slot_pages
    keys = jax.random.split(key, 6)

    def normal(key, *shape):
        return jax.random.normal(key, shape, dtype)

    pool = (layers, pages, page_size, kv_heads, head_dim)
    return {
        "q": normal(keys[0], rows, queries, heads, head_dim),
        "k_block": normal(keys[1], rows, queries, kv_heads, head_dim),
        "v_block": normal(keys[2], rows, queries, kv_heads, head_dim),
        "k_pages": normal(keys[3], *pool),
        "v_pages": normal(keys[4], *pool),
        "block_table": jax.random.permutation(keys[5], pages).reshape(rows, slot_pages).astype(jnp.int32),
        "idx_mapping": jnp.arange(rows, dtype=jnp.int32)[::-1],
        "context_len": jnp.array([contexts[slot % len(contexts)] for slot in range(rows)], jnp.int32),
        "q_len": jnp.full((rows,), queries, jnp.int32),
    }


def check_attention(clock: Clock, small: bool) -> list[dict[str, Any]]:
    """Largest difference from the reference, per shape."""
    base = dict(rows=4, queries=8, heads=8, kv_heads=2, head_dim=128, page_size=64, contexts=[1000, 0, 63, 64])
    if small:
        base |= dict(rows=2, contexts=[70, 0])
    shapes: list[dict[str, Any]] = [
        {},
        {"causal": False, "window": 50},
        {"queries": 1},
        {"queries": 17, "heads": 32},
        {"queries": 128, "window": 40},
        {"head_dim": 64, "page_size": 16},
        {"head_dim": 256, "page_size": 128},
        {"dtype": "float32"},
        {"dtype": "float32", "head_dim": 256, "heads": 4},
    ]
    results = []
    for index, change in enumerate(shapes[:3] if small else shapes):
        if clock.over:
            break
        shape = base | change
        static = {"causal": shape.pop("causal", True), "window": shape.pop("window", None), "layer": 1}
        dtype = jnp.dtype(shape.pop("dtype", "bfloat16"))
        arguments = attention_arguments(jax.random.key(index), layers=2, dtype=dtype, **shape)
        attend = functools.partial(block_attention, **static, scale=shape["head_dim"] ** -0.5)
        with mosaic.simulated() if small else contextlib.nullcontext():
            out = np.asarray(jax.jit(functools.partial(attend, implementation="mosaic_gpu"))(**arguments), np.float64)
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            exact = {
                name: jnp.asarray(np.asarray(value), jnp.float64 if value.dtype == dtype else jnp.int32)
                for name, value in arguments.items()
            }
            error = float(np.abs(out - np.asarray(attend(**exact, implementation="reference"))).max())
        allowed = 1e-5 if dtype == jnp.float32 else 2e-2
        results.append({"shape": change | {"dtype": str(dtype)}, "error": error, "ok": error <= allowed})
    return results


def copy_bandwidth(small: bool) -> float:
    """Bytes per second a large copy reads and writes."""
    x = jnp.zeros((1 << (20 if small else 31),), jnp.uint8)
    return 2 * x.size / seconds(functools.partial(jax.jit(lambda x: x + 1), x))


def attention_bandwidth(rows: int, context: int, small: bool) -> float:
    """Bytes per second of keys and values that verification's attention reads."""
    # Over as many layers as do not fit the L2 cache, as in a forward.
    layers = 2 if small else max(2, min(32, (1 << 29) // (rows * context * 4096)))
    heads = dict(heads=4, kv_heads=2, head_dim=32) if small else dict(heads=32, kv_heads=8, head_dim=128)
    arguments = attention_arguments(
        jax.random.key(0),
        layers=layers,
        rows=rows,
        queries=1 + DRAFTS,
        page_size=PAGE_SIZE,
        contexts=[context],
        dtype=jnp.bfloat16,
        **heads,
    )

    @jax.jit
    def every_layer(arguments):
        q = arguments["q"]
        for layer in range(layers):
            q = block_attention(**arguments | {"q": q}, layer=layer, causal=True, window=None, scale=0.1)
        return q

    pools = arguments["k_pages"].nbytes + arguments["v_pages"].nbytes
    return pools / seconds(lambda: every_layer(arguments))


def random_models(small: bool) -> Models:
    target, draft = tiny() if small else (TARGET, DRAFT)
    keys = iter(jax.random.split(jax.random.key(0), 2000))

    def normal(leaf):
        return jax.jit(
            lambda key: jax.random.normal(key, leaf.param_shape, jnp.float32 if small else jnp.bfloat16) * 0.02
        )(next(keys))

    return models_with(normal, target, draft)


def decoding_state(models: Models, rows: int, context: int, rounds: int) -> EngineState:
    """Every row decodes, in the middle of a long answer."""
    length = context + 10 * rounds * (1 + DRAFTS)
    slot_pages = -(-length // PAGE_SIZE)
    state = init_state(
        models, rows=rows, slots=rows, num_pages=rows * slot_pages, page_size=PAGE_SIZE, max_model_len=length
    )

    def full(value):
        return jnp.full((rows,), value, jnp.int32)

    slots = state.slots.replace(
        position=full(context),
        draft_len=full(context),
        anchor=jnp.arange(rows, dtype=jnp.int32),
        tokens_left=full(length),
        draft_limit=full(length),
        block_table=jnp.arange(rows * slot_pages, dtype=jnp.int32).reshape(rows, slot_pages),
        decoding=jnp.ones((rows,), bool),
        speculating=jnp.ones((rows,), bool),
    )
    return state.replace(rows=state.rows.replace(idx_mapping=jnp.arange(rows, dtype=jnp.int32)), slots=slots)


def round_seconds(models: Models, rows: int, context: int, drafts: int, rounds: int) -> float:
    """Time of one round, host not in between."""
    step = jax.jit(functools.partial(run_rounds, drafts=drafts, rounds=rounds), donate_argnums=1)
    held = [decoding_state(models, rows, context, rounds)]

    def call():
        held[0], report = step(models, held[0])
        return report

    report = call()
    done = int((np.asarray(report.produced) > 0).all(1).sum())
    if done != rounds:
        raise SystemExit(f"{done} of {rounds} rounds ran; violations {np.unique(np.asarray(report.violation))}")
    return seconds(call, repeats=3) / rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--seconds", type=float, default=420, help="start nothing new after this long")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 2, 4, 16], help="in order of importance")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run on a CPU")
    arguments = parser.parse_args()
    clock, small = Clock(arguments.seconds), arguments.tiny
    device = jax.devices()[0]
    if device.platform != "gpu" and not small:
        print(f"this is for a GPU and jax found {device.platform}; --tiny makes a dry run", file=sys.stderr)
        return 2

    result: dict[str, Any] = {"device": device.device_kind, "tiny": small, "jax": jax.__version__}
    result["correctness"] = check_attention(clock, small)
    result["ops"] = check_and_time(small, seconds, lambda: clock.over)
    result["copy_gb_per_s"] = copy_bandwidth(small) / 1e9
    result["attention"] = []
    for rows, context in [(1, 128), (2, 64)] if small else [(1, 4096), (8, 4096), (32, 4096), (1, 32_768), (8, 16_384)]:
        if not clock.over:
            reached = attention_bandwidth(rows, context, small) / 1e9
            part = reached / result["copy_gb_per_s"]
            result["attention"].append({"rows": rows, "context": context, "gb_per_s": reached, "of_copy": part})
    models = random_models(small)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves((models.target, models.draft)))
    result["read_weights_ms"] = weights / 1e6 / result["copy_gb_per_s"]
    result["rounds"] = []
    for rows in [1, 2] if small else arguments.rows:
        if not clock.over:
            context, rounds = (64, 2) if small else (1024, 8)
            speculating, plain = (1e3 * round_seconds(models, rows, context, k, rounds) for k in (DRAFTS, 0))
            over_weights = speculating / result["read_weights_ms"]
            entry = {"rows": rows, "round_ms": speculating, "plain_ms": plain, "over_weights": over_weights}
            result["rounds"].append(entry)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    print(f"{result['device']}, jax {result['jax']}{', TINY: measures nothing' if small else ''}")
    for entry in result["correctness"]:
        print(f"  attention {entry['shape']}: error {entry['error']:.1e} {'ok' if entry['ok'] else 'WRONG'}")
    for entry in result["ops"]:
        line = "  {op} at {rows} rows: error {error:.1e} {verdict}; kernel {mosaic_gpu_ms:.3f} ms, XLA {xla_ms:.3f} ms"
        print(line.format(**entry, verdict="ok" if entry["ok"] else "WRONG"))
    print(f"  copy {result['copy_gb_per_s']:.0f} GB/s; weights read once in {result['read_weights_ms']:.2f} ms")
    for entry in result["attention"]:
        print("  attention rows {rows} context {context}: {gb_per_s:.0f} GB/s, {of_copy:.2f} of a copy".format(**entry))
    for entry in result["rounds"]:
        line = (
            "  round rows {rows}: {round_ms:.2f} ms, {over_weights:.2f} of reading the weights; plain {plain_ms:.2f} ms"
        )
        print(line.format(**entry))
    return 0 if all(entry["ok"] for entry in result["correctness"] + result["ops"]) else 1


if __name__ == "__main__":
    sys.exit(main())
