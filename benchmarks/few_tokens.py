"""Attention of few tokens on the CPU: the native one beside XLA's, alternating in one process.

python benchmarks/few_tokens.py [--heads 9x3x64] [--layers 30] [--cases 1x5x200,8x1x1000]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels import native
from dflash_jax.kernels.block_attention import block_attention

_PAGE_SIZE = 16
_CASES = "1x1x200,1x4x200,1x5x200,1x16x200,1x1x1000,1x5x1000,8x1x200,8x5x200,32x1x200"


@functools.partial(jax.jit, static_argnames=("layers", "implementation"))
def chain(q, pools, indices, layers, implementation):
    """One call per layer, each waiting for the one before."""
    kv_heads, dtype = pools[0].shape[3], pools[0].dtype
    for layer in range(layers):
        fresh = q[:, :, :kv_heads].astype(dtype)
        static = {"layer": layer, "causal": True, "window": None, "scale": q.shape[-1] ** -0.5}
        q += 1e-3 * block_attention(q, fresh, fresh, *pools, *indices, **static, implementation=implementation)
    return q


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="9x3x64", help="heads, KV heads and head_dim")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--cases", default=_CASES, help="rows, tokens of each, and tokens of its context")
    parser.add_argument("--dtype", default="float32", help="of keys and values")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if not native.available():
        raise SystemExit("there is no native attention here")
    heads, kv_heads, head_dim = map(int, options.heads.split("x"))
    draw = np.random.default_rng(0)
    print("rows tokens context     native        XLA")
    for case in options.cases.split(","):
        rows, tokens, context = map(int, case.split("x"))
        slot_pages = -(-(context + tokens) // _PAGE_SIZE)
        shape = (options.layers, rows * slot_pages, _PAGE_SIZE, kv_heads, head_dim)
        pools = [jnp.asarray(draw.standard_normal(shape), options.dtype) for _ in range(2)]
        table = jnp.asarray(draw.permutation(rows * slot_pages).reshape(rows, slot_pages))
        indices = [table, jnp.arange(rows), jnp.full(rows, context), jnp.full(rows, tokens)]
        q = jnp.asarray(draw.standard_normal((rows, tokens, heads, head_dim)), jnp.float32)
        times: dict[str | None, list[float]] = {None: [], "xla": []}
        for _ in range(1 + options.repeats):
            for implementation, taken in times.items():
                begin = time.perf_counter()
                chain(q, pools, indices, options.layers, implementation).block_until_ready()
                taken.append(time.perf_counter() - begin)
        print(
            f"{rows:4d} {tokens:6d} {context:7d} "
            + " ".join(f"{1e3 * statistics.median(taken[1:]):7.2f} ms" for taken in times.values())
        )


if __name__ == "__main__":
    main()
