"""What a block costs by the traffic of its states on the CPU: verify and commit of a block beside as many single steps.

A step of one token reads a row's states to compute its output, and reads and writes them to fold the token in; a block
of k tokens does that once for all of them. Both are told as gigabytes per second of the states that are read and
written, next to what a copy of as many bytes reaches in the same process, and as a ratio of times.

python benchmarks/gated_delta.py [--heads 16x32x128x128] [--layers 4] [--tokens 8] [--rows 1,8,32]
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
from dflash_jax.kernels.gated_delta import fold_block, gated_delta_block

_WIDTH = 4


@functools.partial(jax.jit, static_argnames="implementation")
def verify(qkv, g, beta, conv_weight, states, conv_inputs, idx_mapping, q_len, implementation):
    """The block's outputs and ingredients of each layer, all of the same projections."""
    results = [
        gated_delta_block(
            qkv, g, beta, conv_weight, states, conv_inputs, idx_mapping, q_len, layer=n, implementation=implementation
        )
        for n in range(states.shape[0])
    ]
    out, blocks = zip(*results, strict=True)
    return sum(out), blocks


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=(0, 1))
def commit(states, conv_inputs, blocks, idx_mapping, accepted, implementation):
    return fold_block(states, conv_inputs, blocks, idx_mapping, accepted, implementation=implementation)


def timed(repeats: int, run) -> float:
    """Median of seconds, after a run that compiles."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="16x32x128x128", help="key heads, value heads, key_dim and value_dim")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--implementation", default=None, help="xla, or what the platform decides")
    options = parser.parse_args()
    if options.implementation is None and not native.available():
        raise SystemExit("there is no native code here")
    key_heads, value_heads, key_dim, value_dim = map(int, options.heads.split("x"))
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    draw = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(draw.standard_normal(shape, np.float32))

    def times(tables, tokens: int) -> tuple[float, float]:
        """Of verify and commit."""
        rows = tables[0].shape[1]
        shape = (rows, tokens, value_heads)
        projections = random(rows, tokens, channels), -jnp.abs(random(*shape)), jax.nn.sigmoid(random(*shape))
        weight, indices = random(channels, _WIDTH), (jnp.arange(rows), jnp.full(rows, tokens))
        run = functools.partial(verify, *projections, weight, implementation=options.implementation)
        _, blocks = run(*tables, *indices)

        def fold():
            tables[:] = commit(*tables, blocks, *indices, implementation=options.implementation)
            return tables

        return timed(options.repeats, lambda: run(*tables, *indices)), timed(options.repeats, fold)

    print("rows  verify ms  GB/s  commit ms  GB/s  copy GB/s  step verify ms  step commit ms  block / steps")
    for rows in map(int, options.rows.split(",")):
        tables = [
            random(options.layers, rows, value_heads, key_dim, value_dim),
            random(options.layers, rows, channels, _WIDTH - 1),
        ]
        verified, committed = times(tables, options.tokens)
        single = times(tables, 1)
        source = np.ones(tables[0].shape, np.float32)
        copied = timed(options.repeats, functools.partial(np.copyto, np.empty_like(source), source))
        gigabytes = source.nbytes / 1e9
        print(
            f"{rows:4d} {1e3 * verified:10.2f} {gigabytes / verified:5.1f} {1e3 * committed:10.2f} "
            f"{2 * gigabytes / committed:5.1f} {2 * gigabytes / copied:10.1f} {1e3 * single[0]:15.2f} "
            f"{1e3 * single[1]:15.2f} {(verified + committed) / (options.tokens * sum(single)):14.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
