"""The experts of a sparse MLP on the CPU: native code beside XLA, in turns in one process.

    python benchmarks/experts.py [--sizes 64x8x1024x256] [--tokens 1,8,64]

In XLA all experts compute all tokens.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels.experts import mix_experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64x8x1024x256", help="experts, chosen, hidden size, size of an expert")
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    experts, chosen, hidden, inner = map(int, options.sizes.split("x"))
    draw = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(draw.standard_normal(shape, np.float32), options.dtype)

    matrices = random(experts, hidden, inner), random(experts, hidden, inner), random(experts, inner, hidden)
    names = ("xla", "native")
    print("tokens  " + "  ".join(f"{name + ' ms':>10}" for name in names) + "  matrices' GB/s")
    for tokens in map(int, options.tokens.split(",")):
        taken = np.stack([draw.choice(experts, chosen, replace=False) for _ in range(tokens)])
        inputs = random(tokens, hidden), jnp.asarray(taken), jnp.ones(taken.shape, jnp.float32), *matrices
        times: dict[str, list[float]] = {name: [] for name in names}
        programs = {name: jax.jit(functools.partial(mix_experts, implementation=name)) for name in names}
        for turn in range(options.repeats + 1):
            for name, program in programs.items():
                begin = time.perf_counter()
                program(*inputs).block_until_ready()
                if turn:
                    times[name].append(time.perf_counter() - begin)
        xla, native = (statistics.median(times[name]) for name in names)
        read = len(np.unique(taken)) * sum(matrix[0].nbytes for matrix in matrices) / 1e9
        print(f"{tokens:6d}  {1e3 * xla:10.2f}  {1e3 * native:10.2f}  {read / native:14.1f}", flush=True)


if __name__ == "__main__":
    main()
