"""Products of a few rows on the CPU: the native one beside XLA's, alternating in one process.

    python benchmarks/few_rows.py [--shape 576x1536] [--matrices 40] [--rows 1,2,3,4,5,6,8,12,16]

Matrices of the shape and of its transpose take turns, as in a model's MLP, enough of them that none is in a cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from dflash_jax.kernels import native
from dflash_jax.models.matrix import Matrix


@jax.jit
def chain(x, matrices):
    for matrix in matrices:
        x = x @ matrix
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="576x1536")
    parser.add_argument("--matrices", type=int, default=40)
    parser.add_argument("--rows", default="1,2,3,4,5,6,8,12,16")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if not native.available():
        raise SystemExit("there is no native product here")
    inputs, outputs = map(int, options.shape.split("x"))
    keys = jax.random.split(jax.random.key(0), options.matrices)
    shapes = [(inputs, outputs) if index % 2 == 0 else (outputs, inputs) for index in range(options.matrices)]
    arrays = [jax.random.normal(key, shape) * shape[0] ** -0.5 for key, shape in zip(keys, shapes, strict=True)]
    kinds = {
        "XLA, float32": arrays,
        "native, float32": [Matrix(array.T, "out_in") for array in arrays],
        "native, bfloat16": [Matrix(array.T.astype(jnp.bfloat16), "out_in") for array in arrays],
    }
    print("rows " + " ".join(f"{kind:>17}" for kind in kinds))
    for rows in map(int, options.rows.split(",")):
        x = jax.random.normal(jax.random.key(1), (rows, inputs))
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(1 + options.repeats):
            for kind, matrices in kinds.items():
                begin = time.perf_counter()
                chain(x, matrices).block_until_ready()
                times[kind].append(time.perf_counter() - begin)
        print(f"{rows:4d} " + " ".join(f"{1e3 * statistics.median(took[1:]):14.2f} ms" for took in times.values()))


if __name__ == "__main__":
    main()
