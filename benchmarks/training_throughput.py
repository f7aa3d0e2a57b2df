"""Anchors per second of training, next to the bare forward and backward passes of the draft.

    python benchmarks/training_throughput.py [--steps 5] [--dtype bfloat16]

A drafter of SmolLM2-135M's own shape on made-up sequences: what the step costs over the passes through the
draft's layers is the LM head, the losses, the optimiser. CPU seconds are given beside wall-clock ones, because
other processes on the machine stretch only the latter.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.config import LayerConfig, RopeConfig, TargetConfig
from dflash_jax.models.weights import TargetParams
from dflash_jax.training.config import DraftSection, InitSection, LossSection, OptimiserSection
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.drafts.init import fresh_params
from dflash_jax.training.drafts.start import fresh_config
from dflash_jax.training.objective.anchors import sample_anchors
from dflash_jax.training.objective.forward import block_hidden
from dflash_jax.training.objective.sampled_softmax import plan_subset
from dflash_jax.training.objective.shared_weights import SharedWeights
from dflash_jax.training.optimiser import make_optimiser
from dflash_jax.training.precision import in_precision
from dflash_jax.training.run.state import initial_state
from dflash_jax.training.run.step import make_train_step

SMOLLM2 = TargetConfig(
    vocab_size=49152,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100_000.0),
    layers=(LayerConfig(),) * 30,
    qk_norm=False,
    attention_bias=False,
    family="llama",
    tied_embeddings=True,
)
LENGTH = 384


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fastest(call, repetitions: int) -> tuple[float, float]:
    """Least wall-clock and least CPU seconds of a call."""
    jax.block_until_ready(call())
    walls, cpus = [], []
    for _ in range(repetitions):
        wall, cpu = time.perf_counter(), cpu_seconds()
        jax.block_until_ready(call())
        walls.append(time.perf_counter() - wall)
        cpus.append(cpu_seconds() - cpu)
    return min(walls), min(cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--block-size", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=64, help="per sequence")
    parser.add_argument("--frequent", type=int, default=3072, help="tokens in every step's softmax; 0 for all")
    parser.add_argument("--drawn", type=int, default=1024, help="tokens drawn from the others")
    options = parser.parse_args()

    key = jax.random.key(0)
    embedding = jax.random.normal(key, (SMOLLM2.vocab_size, SMOLLM2.hidden_size)) * 0.05
    target = TargetParams(embedding=embedding, layers=(), norm=jnp.ones(SMOLLM2.hidden_size))
    section = DraftSection(block_size=options.block_size, mask_token_id=16, target_layer_ids=(1, 14, 27))
    config = fresh_config(section, SMOLLM2)
    params = fresh_params(key, config, InitSection(), target, SMOLLM2)
    shared = SharedWeights(embedding, embedding.astype(options.dtype))
    count = options.sequences
    batch = Batch(
        tokens=jax.random.randint(key, (count, LENGTH), 0, 12_000),
        prompt_lens=jnp.full((count,), 50, jnp.int32),
        seq_lens=jnp.full((count,), LENGTH, jnp.int32),
        features=jax.random.normal(key, (count, LENGTH, 3 * SMOLLM2.hidden_size)),
    )
    anchors = sample_anchors(key, batch.prompt_lens, batch.seq_lens, LENGTH, options.anchors)
    rng = np.random.default_rng(0)
    plan = plan_subset(
        np.bincount(rng.zipf(1.2, 200_000) % 12_000, minlength=SMOLLM2.vocab_size),
        unseen=True,
        frequent=options.frequent or None,
        drawn=options.drawn,
    )
    cores = len(os.sched_getaffinity(0))

    def told(name: str, seconds: tuple[float, float]) -> float:
        wall, cpu = seconds
        blocks = count * options.anchors
        print(
            f"{name}: {blocks / wall:.0f} anchors/s ({wall:.3f} s a step), "
            f"{blocks * cores / cpu:.0f} anchors/s by CPU time on {cores} cores",
            flush=True,
        )
        return cpu

    @jax.jit
    @jax.grad
    def bare(params):
        hidden = block_hidden(
            in_precision(params, options.dtype),
            config,
            embedding,
            batch.features,
            anchors.positions,
            jnp.take_along_axis(batch.tokens, anchors.positions, 1),
        )
        return jnp.sum(jnp.square(hidden))

    passes = told("bare forward and backward", fastest(lambda: bare(params), options.steps))

    training = OptimiserSection(steps=1000, sequences=count, anchors=options.anchors)
    optimiser = make_optimiser(training, options.dtype)
    step = make_train_step(config, options.dtype, LossSection(), training, optimiser)
    held = [initial_state(params, optimiser, key)]
    scale = jnp.ones(batch.features.shape[-1])

    def one_step():
        held[0], metrics = step(held[0], batch, shared, plan, scale)
        return metrics

    whole = told("training step", fastest(one_step, options.steps))
    print(f"a step is {whole / passes:.2f} times the bare passes")


if __name__ == "__main__":
    main()
