"""Compiles Gated DeltaNet's ops for an NVIDIA H200 on a machine that has none; `gpu_compile.py` says what that needs.

For eight rows: verify of all layers' blocks, their commit, both of one token, and a prompt's chunk with its write.
Exits with 1 if a table of states is copied, if what writes does not write in place, or if temporary memory grows with
the number of slots.
"""

from __future__ import annotations

import re
import sys

import jax
import jax.numpy as jnp
from gpu_compile import H200
from jax.experimental import topologies

from dflash_jax.kernels.gated_delta import fold_block, gated_delta_block, gated_delta_prefill, write_rows

_WIDTH, _DIM = 4, 128
# Gated DeltaNet layers, key heads and value heads; published targets have 18 to 48 such layers, which are all alike.
_SHAPES = ((4, 16, 32), (4, 16, 64))
_MOSAIC = 'custom_call_target="mosaic_gpu'


def programs(layers: int, key_heads: int, value_heads: int, rows: int, slots: int):
    """Name, function and arguments of each, the tables first, and whether it writes them."""
    channels = (2 * key_heads + value_heads) * _DIM

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    states = array(layers, slots, value_heads, _DIM, _DIM)
    tables = states, array(layers, slots, channels, _WIDTH - 1, dtype=jnp.bfloat16)
    indices = array(rows, dtype=jnp.int32), array(rows, dtype=jnp.int32)
    weight = array(channels, _WIDTH, dtype=jnp.bfloat16)

    def projections(tokens):
        gates = array(rows, tokens, value_heads)
        return [(array(rows, tokens, channels, dtype=jnp.bfloat16), gates, gates)] * layers

    def of_layers(op, tables, projections, weight, indices):
        """Layer after layer, each with gates that need the outputs of the one before."""
        total, kept = 0, []
        for layer, (qkv, g, beta) in enumerate(projections):
            inputs = (qkv, g, beta + total, weight, *tables, *indices)
            out, of_layer = op(*inputs, layer=layer, implementation="mosaic_gpu")
            total += out.mean(-1)
            kept.append(of_layer)
        return total, kept

    def verify(tables, *rest):
        return of_layers(gated_delta_block, tables, *rest)

    def commit(tables, blocks, indices):
        return fold_block(*tables, blocks, *indices, implementation="mosaic_gpu")

    def prefill(tables, *rest):
        out, ends = of_layers(gated_delta_prefill, tables, *rest)
        return out, write_rows(*tables, ends, rest[-1][0])

    def decode(tables, *rest):
        out, blocks = verify(tables, *rest)
        return out, commit(tables, blocks, (rest[-1][0], jnp.ones_like(rest[-1][1])))

    block = (tables, projections(8), weight, indices)
    _, blocks = jax.eval_shape(verify, *block)
    return [
        ("verify 8 tokens", verify, block, False),
        ("commit 8 tokens", commit, (tables, blocks, indices), True),
        ("verify and commit one token", decode, (tables, projections(1), weight, indices), True),
        ("prefill 512 tokens", prefill, (tables, projections(512), weight, indices), True),
    ]


def compile_program(run, arguments, writes: bool) -> dict[str, float]:
    """Launches of kernels, copies of tables, and bytes."""
    topology = topologies.get_topology_desc("gpu", "cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(topology.devices, ("device",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arguments)
    traced = jax.jit(run, donate_argnums=0 if writes else ()).trace(*placed)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    shapes = {",".join(map(str, table.shape)) for table in arguments[0]}
    return {
        "kernels": text.count(_MOSAIC),
        "copies": sum(x in shapes for x in re.findall(r"\[([\d,]+)\][^=\n]* (?:copy|copy-start)\(", text)),
        "tables": sum(table.size * table.dtype.itemsize for table in arguments[0]),
        "donated": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }


def main() -> int:
    rows = 8
    print("| layers | value heads | op | slots | mosaic_gpu | table copies | donated / tables GB | temporary MB |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = []
    for layers, key_heads, value_heads in _SHAPES:
        temporary: dict[str, list[float]] = {}
        for slots in (rows, 4 * rows):
            for name, run, arguments, writes in programs(layers, key_heads, value_heads, rows, slots):
                found = compile_program(run, arguments, writes)
                temporary.setdefault(name, []).append(found["temporary"])
                print(
                    f"| {layers} | {value_heads} | {name} | {slots} | {found['kernels']} | {found['copies']} "
                    f"| {found['donated'] / 1e9:.3f} / {found['tables'] / 1e9:.3f} "
                    f"| {found['temporary'] / 1e6:.1f} |",
                    flush=True,
                )
                case = f"{layers} layers, {name}, {slots} slots"
                if found["copies"]:
                    wrong.append(f"{case}: {found['copies']} copies of a table")
                if writes and found["donated"] < found["tables"]:
                    wrong.append(f"{case}: {found['tables'] - found['donated']} bytes not donated")
        for name, sizes in temporary.items():
            if max(sizes) > 1.1 * min(sizes):
                wrong.append(f"{layers} layers, {name}: temporary memory grows with the slots, {sizes}")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
