"""The recall pairs and their records, loaded once: the reference's golden ones, and two trained by this package."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors.numpy import load_file

from dflash_jax import Completion, Engine, EngineConfig
from dflash_jax.checkpoints import load_draft, load_target
from dflash_jax.engine import Models
from dflash_jax.engine.absorb import absorb
from dflash_jax.engine.output import join_updates
from dflash_jax.engine.pages import empty_pool
from dflash_jax.engine.plan import make_plan

GOLDEN = Path(__file__).parent / "golden"
PAIRS = ("recall-dflash1", "recall-dflash2", "recall-dflash2-swa")


# What configs/train-recall.yaml and configs/train-recall-hybrid.yaml make. Their records are the engine's own, of each
# request alone.
TRAINED = "recall-trained"
TRAINED_HYBRID = "recall-hybrid-trained"
ALL_TRAINED = (TRAINED, TRAINED_HYBRID)

# A Qwen3.5 target: its reference record was made without any cache, in whole blocks.
HYBRID = "recall-hybrid-dflash2"
SERVED = (*PAIRS, *ALL_TRAINED, HYBRID)

SAMPLING: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}

# One set of sizes for all tests: each distinct one costs a compilation.
SIZES: dict[str, Any] = {"max_slots": 4, "max_model_len": 160, "page_size": 16, "strict": True}


def trained_files(pair: str) -> Path:
    """The directory of a pair that was trained by this package."""
    return Path(__file__).parent / pair


@functools.cache
def models(draft: str | None) -> Models:
    folder = GOLDEN / ("recall-hybrid-target" if draft == HYBRID else "recall-target")
    target = load_target(trained_files(draft) / "target" if draft in ALL_TRAINED else folder)
    if draft is None:
        return Models(target.params, target.config)
    loaded = load_draft(trained_files(draft) / "draft" if draft in ALL_TRAINED else GOLDEN / draft)
    return Models(target.params, target.config, loaded.params, loaded.config)


def engine(
    draft: str | None,
    *,
    k: int | None = None,
    width: int | Literal["auto"] | None = None,
    max_context: int | None = None,
    pages: int | None = None,
    slots: int | None = None,
    **sizes: Any,
) -> Engine:
    """An engine on a recall pair.

    `pages` and `slots` limit what the host may use without changing any shape on the device, so that
    small pools and few slots need no compilation of their own.
    """
    served = Engine(models(draft), EngineConfig(**{**SIZES, **sizes}), k=k, width=width, max_context=max_context)
    pool = served.host.pool if pages is None else empty_pool(pages, served.config.page_size)
    policy = dataclasses.replace(served.host.policy, max_slots=slots or served.host.policy.max_slots)
    served.host = dataclasses.replace(served.host, pool=pool, policy=policy)
    return served


@functools.cache
def cases(draft: str) -> tuple[dict[str, Any], ...]:
    file = trained_files(draft) / "cases.json" if draft in ALL_TRAINED else GOLDEN / f"{draft}.json"
    return tuple(json.loads(file.read_text())["cases"])


@functools.cache
def tensors(name: str) -> dict[str, Any]:
    return load_file(GOLDEN / f"{name}.safetensors")


def prompts(draft: str) -> list[list[int]]:
    return [case["prompt"] for case in cases(draft)]


def full_blocks(case: dict[str, Any]) -> list[list[int]]:
    """Drafted blocks up to the first that the reference cut short; see golden/README.md."""
    k = len(case["drafted_blocks"][0])
    blocks = case["drafted_blocks"]
    return blocks[: next((i for i, block in enumerate(blocks) if len(block) < k), len(blocks))]


def assert_is_golden(completion: Completion, case: dict[str, Any]) -> None:
    assert list(completion.token_ids) == case["greedy_tokens"]
    assert list(completion.produced_per_round) == case["produced_per_round"]
    drafted = [list(block) for block in completion.drafted_blocks]
    assert drafted[: len(full_blocks(case))] == full_blocks(case)


def step_in_order(served: Engine, order: Callable[[int], Sequence[int]]) -> None:
    """One step with the rows of its plan in another order; what it brings waits in `host.undelivered`.

    Args:
      served: the engine.
      order: for a number of rows, which row comes where; see `Plan.permuted`.
    """
    host, plan = make_plan(served.host)
    plan = plan.permuted(order(len(plan.chunks)), order(len(plan.decodes)))
    served.state, report = served._run(served.state, plan)
    host, updates = absorb(host, plan, report, 0.0, served._read)
    served.host = dataclasses.replace(host, undelivered=join_updates(host.undelivered, updates))


def record(completion: Completion) -> tuple[Any, ...]:
    """What must not depend on who else is served: tokens, rounds, drafted blocks."""
    return completion.token_ids, completion.produced_per_round, completion.drafted_blocks


@functools.cache
def alone(draft: str | None, prompt: tuple[int, ...], sampling: tuple[tuple[str, Any], ...] = ()) -> Completion:
    """A request on its own in a fresh engine."""
    return engine(draft, prefix_cache=False).generate([prompt], {**SAMPLING, **dict(sampling)})[0]
