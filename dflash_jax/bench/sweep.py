"""A sweep: the same requests at growing concurrency, with and without speculation, in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.acceptance import total_acceptance
from dflash_jax.bench.config import SweepConfig
from dflash_jax.bench.prompts import make_prompts
from dflash_jax.compiling import CompileWatch
from dflash_jax.engine import Completion, Engine, Models, SamplingParams
from dflash_jax.errors import ConfigError
from dflash_jax.jobs.summary import versions


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of every level.

    Attributes:
      prompt_tokens, output_tokens: of each request, exactly.
      requests_per_slot: requests for each slot of a level, at least.
      repeats: times that a level's requests are timed, each way.
      seed: of random prompts, and of the sampling.
    """

    prompt_tokens: int = 64
    output_tokens: int = 64
    requests_per_slot: int = 2
    repeats: int = 3
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """A load that ran once: seconds from the first request to the last token; completions in the prompts' order."""

    seconds: float
    completions: tuple[Completion, ...]


def run_sweep(
    config: SweepConfig,
    concurrency: Sequence[int],
    load: Load,
    *,
    note: Callable[[str], None] = lambda text: None,
    on_level: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[str, Any]:
    """Runs a load at each concurrency in turn.

    At each of them, a level of the sweep, there is an engine with as many slots for each way: the plain one
    has no draft at all, as a user without speculation would run it. As many requests are in flight at any
    time, a new one taking the place of each that finishes. Every level runs every prompt equally often, so
    that the levels' acceptance can be compared. The load is run once to compile all that it needs, then
    `repeats` times in turns; the best time counts, being the least disturbed.

    Args:
      config: the models and the engine; `max_slots`, `num_pages`, `prefix_cache` and `strict` are the sweep's.
      concurrency: the levels.
      load: the requests.
      note: called with a line of progress.
      on_level: is given, after each level, what is returned at the end with the levels so far.

    Returns:
      Plain values: what was run, and `levels`, each with `on`, `off` (see `figures`) and `ratio`. `status` is
      "finished" when all levels are there, and "running" before.

    Raises:
      ConfigError, CheckpointError: it cannot be run.
    """
    longest = load.prompt_tokens + load.output_tokens
    if longest > config.engine.max_model_len:
        raise ConfigError(
            f"prompts of {load.prompt_tokens} and outputs of {load.output_tokens} tokens need {longest}, but "
            f"engine.max_model_len is {config.engine.max_model_len}"
        )
    with CompileWatch() as watch:
        note(f"loading {config.target.path} and {config.draft.path}")
        loaded = Engine.from_config(config.with_slots(1))
        prompts = make_prompts(loaded, _engine(config, loaded, 1, False, watch), config, load.prompt_tokens, load.seed)
        note(f"prompts: {prompts.source}")
        sampling = dataclasses.replace(
            config.defaults, max_tokens=load.output_tokens, seed=load.seed, stop=(), stop_token_ids=(), ignore_eos=True
        )
        sizes = config.engine.model_dump(mode="json", exclude={"max_slots", "num_pages", "prefix_cache", "strict"})
        found: dict[str, Any] = {
            "status": "running",
            "target": config.target.path,
            "draft": config.draft.path,
            "k": loaded.k,
            "engine": sizes,
            "prompts": {"source": prompts.source, "distinct": len(prompts.token_ids), "tokens": load.prompt_tokens},
            "output_tokens": load.output_tokens,
            "temperature": sampling.temperature,
            "seed": load.seed,
            "repeats": load.repeats,
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
            "compilation": watch.figures(),
            "levels": [],
        }
        for slots in concurrency:
            whole = -(-slots * load.requests_per_slot // len(prompts.token_ids))
            note(f"{slots} in flight: compiling, then {load.repeats} runs each way")
            level = _level(config, loaded, slots, prompts.token_ids * whole, sampling, load.repeats, watch)
            found = {**found, "compilation": watch.figures(), "levels": [*found["levels"], level]}
            note(f"{slots} in flight: {level['ratio']:.2f} times plain decoding")
            on_level(found)
    return {**found, "status": "finished"}


def figures(runs: Sequence[Run], output_tokens: int) -> dict[str, Any]:
    """Results of a load: speed, latencies and acceptance of the fastest run, and how many requests failed in all.

    Args:
      runs: all of one way, the one that compiled first; that one is not timed, but its requests count.
      output_tokens: a request has failed unless it ran and made exactly so many.
    """
    every = [c for run in runs for c in run.completions]
    failed = [c for c in every if c.finish_reason == "error" or len(c.token_ids) != output_tokens]
    best = min(runs[1:], key=lambda run: run.seconds)
    completions = best.completions
    acceptance = total_acceptance(c.metrics for c in completions)
    return {
        "output_tokens_per_s": sum(len(c.token_ids) for c in completions) / best.seconds,
        "tpot_s": _mean_and_median([c.metrics.tpot_s for c in completions]),
        "ttft_s": _mean_and_median([c.metrics.ttft_s for c in completions]),
        **acceptance.ratios(),
        "seconds": best.seconds,
        "completed": len(every) - len(failed),
        "failed": len(failed),
        "errors": sorted({c.error for c in failed if c.error is not None}),
    }


def failures(found: dict[str, Any]) -> int:
    """How many requests of a sweep failed."""
    return sum(level[way]["failed"] for level in found["levels"] for way in ("on", "off"))


def _level(
    config: SweepConfig,
    loaded: Engine,
    slots: int,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    repeats: int,
    watch: CompileWatch,
) -> dict[str, Any]:
    engines = {way: _engine(config, loaded, slots, way == "on", watch) for way in ("off", "on")}
    runs: dict[str, list[Run]] = {"off": [], "on": []}
    # The first time compiles everything, since the steps are the same each time.
    for _ in range(1 + repeats):
        for way, engine in engines.items():
            runs[way].append(_run(engine, prompts, slots, sampling, watch))
    on, off = (figures(runs[way], sampling.max_tokens) for way in ("on", "off"))
    pairs = zip(runs["on"][0].completions, runs["off"][0].completions, strict=True)
    return {
        "concurrency": slots,
        "requests": len(prompts),
        "ratio": on["output_tokens_per_s"] / off["output_tokens_per_s"],
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in pairs) if sampling.temperature == 0 else None,
        "on": on,
        "off": off,
    }


def _engine(config: SweepConfig, loaded: Engine, slots: int, speculation: bool, watch: CompileWatch) -> Engine:
    """An engine of so many slots on models that are loaded already."""
    sizes, models = config.with_slots(slots).engine, loaded.models
    if not speculation:
        return Engine(Models(models.target, models.target_config), sizes, clock=watch.clock)
    draft = config.draft
    return Engine(models, sizes, k=loaded.k, width=draft.width, max_context=draft.max_context, clock=watch.clock)


def _run(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    concurrency: int,
    sampling: SamplingParams,
    watch: CompileWatch,
) -> Run:
    """Runs requests, so many in flight at any time."""
    done: dict[str, Completion] = {}
    added = 0
    begin = watch.clock()
    while len(done) < len(prompts):
        while added < len(prompts) and added - len(done) < concurrency:
            engine.add_request(prompts[added], sampling, request_id=str(added))
            added += 1
        done.update((u.id, u.completion) for u in engine.step() if u.completion is not None)
    seconds = watch.clock() - begin
    return Run(seconds, tuple(done[str(index)] for index in range(len(prompts))))


def _mean_and_median(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"mean": float(np.mean(known)), "median": float(np.median(known))} if known else None
