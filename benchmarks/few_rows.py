"""Products of some rows on the CPU: native ones beside XLA's, for each way to keep a matrix, in turns.

    python benchmarks/few_rows.py [--shape 576x1536] [--matrices 40] [--rows 1,2,4,8,16,64,512] [--kinds f32,bf16,Q4_1]

Matrices of the shape and of its transpose take turns, as in a model's MLP, enough of them that none is in a cache. The
table has milliseconds for all of them, the least of the repeats; beside it stands what reading them at the speed of a
copy would take.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels import native
from dflash_jax.kernels.compact import FORMATS, compact
from dflash_jax.kernels.matmul import matmul


@partial(jax.jit, static_argnames=("implementation",))
def chain(x, matrices, *, implementation):
    for matrix in matrices:
        # Compact matrices make float32 of it; scaled so that sums of any codes stay numbers.
        x = matmul(x, matrix, layout="out_in", implementation=implementation) * 1e-2
    return x


def drawn(kind: str, inputs: int, outputs: int, seed: int):
    """A matrix [outputs, inputs]."""
    rng = np.random.default_rng(seed)
    if kind in ("f32", "bf16"):
        return jnp.asarray(rng.normal(size=(outputs, inputs)), "float32" if kind == "f32" else "bfloat16")
    form = FORMATS[kind]
    if not form.halves:
        scales = np.ones((outputs, 1), np.float32) if form.scaled else None
        values = rng.integers(-4, 5, (outputs, inputs)).astype(form.dtype_of_codes)
        return compact(values, kind, scales, inputs)
    codes = rng.integers(0, 256, (outputs, inputs // form.inputs, form.size), np.uint8)
    for at in form.halves:
        codes[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return compact(codes.reshape(outputs, -1), kind)


def copy_speed() -> float:
    """Bytes a second that all cores read while they copy."""
    source = jnp.zeros(1 << 26, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    least = float("inf")
    for _ in range(9):
        begin = time.perf_counter()
        copy(source).block_until_ready()
        least = min(least, time.perf_counter() - begin)
    return source.nbytes / least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="576x1536")
    parser.add_argument("--matrices", type=int, default=40)
    parser.add_argument("--rows", default="1,2,3,4,5,6,8,12,16")
    parser.add_argument("--kinds", default="f32,bf16,BF16,Q8_0,Q4_1")
    parser.add_argument("--xla", default="f32,bf16", help="kinds that XLA multiplies too")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if not native.available():
        raise SystemExit("there is no native product here")
    inputs, outputs = map(int, options.shape.split("x"))
    kinds = {}
    for kind in options.kinds.split(","):
        matrices = [
            drawn(kind, *((inputs, outputs) if index % 2 == 0 else (outputs, inputs)), index)
            for index in range(options.matrices)
        ]
        for implementation in ("native", "xla") if kind in options.xla.split(",") else ("native",):
            kinds[f"{implementation} {kind}"] = (matrices, implementation)
    print("rows " + " ".join(f"{kind:>13}" for kind in kinds))
    read = copy_speed()
    limits = [sum(leaf.nbytes for leaf in jax.tree.leaves(matrices)) / read for matrices, _ in kinds.values()]
    print("copy " + " ".join(f"{1e3 * limit:10.2f} ms" for limit in limits))
    for rows in map(int, options.rows.split(",")):
        x = jax.random.normal(jax.random.key(1), (rows, inputs))
        least = dict.fromkeys(kinds, float("inf"))
        for turn in range(1 + options.repeats):
            for kind, (matrices, implementation) in kinds.items():
                given = x.astype(jnp.bfloat16) if kind.endswith("bf16") else x
                begin = time.perf_counter()
                chain(given, matrices, implementation=implementation).block_until_ready()
                if turn:
                    least[kind] = min(least[kind], time.perf_counter() - begin)
        print(f"{rows:4d} " + " ".join(f"{1e3 * took:10.2f} ms" for took in least.values()), flush=True)


if __name__ == "__main__":
    main()
