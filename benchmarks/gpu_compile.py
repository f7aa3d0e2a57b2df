"""Compiles whole rounds for an NVIDIA H200 on a machine that has none, and prints what they would do.

XLA compiles ahead of time for a GPU that is only described, Pallas kernels included. The result cannot
run here; it says how many kernels a round launches, what memory it needs, whether the state is updated
in place, and whether a page pool, a table of states or weights are copied anywhere. Exits with 1 if
they are, if temporary memory grows with the pool, or if the state is not donated whole.

Needs an environment of its own with JAX's CUDA plugin at the version the project is pinned to (3 GB):

    python3 -m venv gpu-aot
    gpu-aot/bin/pip install -e . "jax[cuda12]==0.10.2"
    gpu-aot/bin/python benchmarks/gpu_compile.py
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter

# Without a GPU the plugin's check of the installed CUDA libraries cannot pass.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax.experimental import topologies
from published_shapes import DRAFTS, PAIRS, abstract_models, abstract_state, pair

from dflash_jax.engine.device import GPU_OPTIONS
from dflash_jax.engine.steps import run_rounds

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H200"
"""

# Instructions of a compiled program that launch at least one kernel each.
_LAUNCHES = re.compile(r"[\]})] (fusion|custom-call|copy|copy-start|sort|dot|convolution|reduce|scatter|gather)\(")


def compile_round(*, of: str, rows: int, num_pages: int, page_size: int, rounds: int, implementation: str):
    """The compiled program, and the shapes of the models and the state it was compiled for."""
    models = abstract_models(*pair(of))
    state = abstract_state(models, rows=rows, num_pages=num_pages, page_size=page_size, max_model_len=40_960)
    topology = topologies.get_topology_desc("gpu", "cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(topology.devices, ("device",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    models, state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (models, state)
    )

    def step(models, state):
        return run_rounds(models, state, drafts=DRAFTS, rounds=rounds, implementation=implementation)

    traced = jax.jit(step, donate_argnums=1).trace(models, state)
    return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=GPU_OPTIONS), models, state


def describe(compiled, models, state) -> dict[str, int]:
    """Launches (of a loop's body once), bytes, and copies of pools, of recurrent states and of weights.

    `kernels` and `mosaic_gpu` count both branches of a conditional, `always` and `logits_bytes` (float32 arrays
    over the vocabulary) only what lies in no branch: what every round launches and writes, whoever samples.
    """
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    launches = Counter(_LAUNCHES.findall(_without_fused(text)))
    always = _always(text)
    logits = re.findall(
        rf"= f32\[([\d,]*\b{models.target_config.vocab_size})\]\S* (?:fusion|custom-call|dot|copy)\(", always
    )
    held = jax.tree.leaves((state.target_pages, state.draft_pages, state.recurrent, state.checkpoints))
    pools = {",".join(map(str, leaf.shape)) for leaf in held if leaf.size}
    copies = re.findall(r"\[([\d,]+)\][^=\n]* (?:copy|copy-start)\(", text)
    return {
        "kernels": launches.total(),
        "always": len(_LAUNCHES.findall(always)),
        "logits_bytes": sum(4 * math.prod(map(int, shape.split(","))) for shape in logits),
        "mosaic_gpu": text.count('custom_call_target="mosaic_gpu'),
        "matmul": len(re.findall(r'custom_call_target="__cublas|"kind":"__triton\w*gemm', text)),
        "state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "donated_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "pool_copies": sum(shape in pools for shape in copies),
        "weight_copies": _weight_copies(text, models),
    }


def _weight_copies(text: str, models) -> int:
    """Matrices, with as many rows as a model's activations are wide, that are concatenated from others."""
    widths = {models.target_config.hidden_size, models.draft_config.hidden_size}
    dtype = {"bfloat16": "bf16", "float32": "f32"}[models.target.embedding.dtype.name]
    made = re.findall(rf"= {dtype}\[(\d+),\d+\]\S* concatenate\(.*dimensions={{1}}", text)
    return sum(int(rows) in widths for rows in made)


def _without_fused(text: str) -> str:
    """The program without the bodies of fusions, whose instructions are not launches of their own."""
    fused = set(re.findall(r" fusion\(.*calls=(%[\w.\-]+)", text))
    computations = re.split(r"\n(?=%|ENTRY)", text)
    return "\n".join(body for body in computations if body.split(" ", 1)[0] not in fused)


def _always(text: str) -> str:
    """The computations that run whatever the conditionals decide, without the bodies of fusions."""
    bodies = {}
    for body in re.split(r"\n(?=%|ENTRY)", _without_fused(text)):
        bodies[body.removeprefix("ENTRY ").split(" ", 1)[0]] = body
    reached, to_visit = {}, [name for name, body in bodies.items() if body.startswith("ENTRY")]
    while to_visit:
        name = to_visit.pop()
        if name in bodies and name not in reached:
            reached[name] = bodies[name]
            to_visit += re.findall(r"(?:body|condition|calls)=(%[\w.\-]+)", bodies[name])
    return "\n".join(reached.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=PAIRS, default=PAIRS[0])
    parser.add_argument("--pages", type=int, nargs="+", default=[1000, 16_000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    middle = arguments.rows[len(arguments.rows) // 2]
    # Several rounds in one dispatch are a loop, which is where XLA is tempted to copy; plain XLA to compare with.
    cases = [("mosaic_gpu", rows, 1) for rows in arguments.rows] + [("mosaic_gpu", middle, 4), ("xla", middle, 1)]
    columns = ("kernels", "always", "mosaic_gpu", "matmul", "pool_copies", "weight_copies")
    print(
        "| kernels of | rows | rounds | pages | "
        + " | ".join(columns)
        + " | donated / state GB | logits MB | temporary MB |"
    )
    print("|---" * (len(columns) + 7) + "|")
    wrong = []
    for implementation, rows, rounds in cases:
        temporary = {}
        for num_pages in arguments.pages:
            compiled, models, state = compile_round(
                of=arguments.pair,
                rows=rows,
                num_pages=num_pages,
                page_size=arguments.page_size,
                rounds=rounds,
                implementation=implementation,
            )
            found = describe(compiled, models, state)
            temporary[num_pages] = found["temporary_bytes"]
            print(
                f"| {implementation} | {rows} | {rounds} | {num_pages} | "
                + " | ".join(str(found[column]) for column in columns)
                + f" | {found['donated_bytes'] / 1e9:.3f} / {found['state_bytes'] / 1e9:.3f}"
                + f" | {found['logits_bytes'] / 1e6:.1f} | {found['temporary_bytes'] / 1e6:.1f} |",
                flush=True,
            )
            case = f"{implementation}, {rows} rows, {rounds} rounds, {num_pages} pages"
            if found["pool_copies"]:
                wrong.append(f"{case}: {found['pool_copies']} copies of a page pool")
            if found["weight_copies"]:
                wrong.append(f"{case}: {found['weight_copies']} copies of weights")
            if found["donated_bytes"] < found["state_bytes"]:
                wrong.append(f"{case}: {found['state_bytes'] - found['donated_bytes']} bytes not donated")
        if max(temporary.values()) > 1.1 * min(temporary.values()):
            wrong.append(f"{implementation}, {rows} rows: temporary memory grows with the pool, {temporary}")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
