"""What a step and a request cost on the host, with the device's part left out.

A stub in the place of the device answers every plan with tokens at once, so what is timed is planning,
laying the plan out as arrays, and absorbing. It must not grow with the queue, the contexts or the outputs.

    python benchmarks/host_time.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np

from dflash_jax.engine.host import HostState, Policy, add
from dflash_jax.engine.identity import ModelIdentity, ModelsIdentity
from dflash_jax.engine.inputs import decode_inputs, prefill_inputs
from dflash_jax.engine.pages import empty_pool
from dflash_jax.engine.plan import Plan
from dflash_jax.engine.request import Request, SamplingParams
from dflash_jax.engine.run import StepReport, step
from dflash_jax.engine.steps import Report

PAGE = 16


class Stub:
    """Answers plans as a device would whose target accepts half of every block."""

    def __init__(self, k: int, slot_pages: int):
        self.k, self.slot_pages = k, slot_pages
        self.position = np.zeros(4096, np.int32)

    def __call__(self, device: None, plan: Plan) -> tuple[None, StepReport]:
        prefill = decode = None
        if plan.chunks:
            inputs = prefill_inputs(plan.chunks, plan.chunk_width, self.slot_pages)
            for row in plan.chunks:
                if row is not None:
                    start = self.position[row.slot] if row.opening is None else row.opening.position
                    self.position[row.slot] = start + len(row.tokens)
            produced = (inputs.last & (inputs.known_next < 0)).astype(np.int32)
            prefill = self._report(inputs.idx_mapping, produced, 1, 0)
        if plan.decodes:
            inputs = decode_inputs(plan)
            produced = np.where(inputs.idx_mapping >= 0, 1 + self.k // 2, 0).astype(np.int32)
            self.position[inputs.idx_mapping[inputs.idx_mapping >= 0]] += 1 + self.k // 2
            decode = self._report(inputs.idx_mapping, produced, 1 + self.k, self.k)
            decode = jax.tree.map(lambda leaf: leaf[None], decode)
        return None, StepReport(prefill, decode)

    def _report(self, mapping: np.ndarray, produced: np.ndarray, width: int, drafts: int) -> Report:
        rows, none = len(mapping), np.zeros(len(mapping), bool)
        return Report(
            tokens=np.full((rows, width), 7, np.int32),
            produced=produced,
            drafts=np.full((rows, drafts), 7, np.int32),
            num_drafts=np.full(rows, drafts, np.int32),
            num_verified=np.full(rows, drafts, np.int32),
            bins=np.zeros((rows, drafts), np.int32),
            damaged_draft=none,
            position=self.position[np.maximum(mapping, 0)],
            finished=none,
            stopped=none,
            violation=np.zeros(rows, np.int32),
        )


def host_of(requests: int, running: int, context: int, k: int, chunk: int) -> HostState:
    """Requests queued on an engine with room for `running` contexts of that many tokens and more."""
    host = empty_host(running, context, k, chunk)
    prompt = tuple(range(context))
    for number in range(requests):
        # Prompts differ in their first token, so that none finds its pages in the prefix cache.
        host = add(host, Request(str(number), (number + 10**6, *prompt[1:]), SamplingParams(), (), 10**6), 0.0)
    return host


def empty_host(running: int, context: int, k: int, chunk: int) -> HostState:
    """A host with no requests in it."""
    pool = empty_pool(running * (context // PAGE + 4_000), PAGE)
    identity = ModelsIdentity(ModelIdentity("a stub", ""), ModelIdentity("a stub", ""))
    return HostState(Policy(max_slots=running, prefill_chunk=chunk, k=k), identity, pool)


def step_seconds(queued: int, running: int, context: int, outputs: int = 0, steps: int = 60, k: int = 7) -> float:
    """Median seconds of a step in which `running` requests decode.

    Args:
      queued: requests that wait beside them.
      running: requests that decode.
      context: tokens of each prompt.
      outputs: tokens that each has produced before.
      steps: how many are timed.
      k: drafted tokens a round.
    """
    host = host_of(running, running, context, k, chunk=running * context)
    run = Stub(k, context // PAGE + 4_000)
    while not all(sequence.decoding for sequence in host.in_flight):
        host, _, _ = step(run, host, None, time.perf_counter)
    for number in range(queued):
        host = add(host, Request(f"queued {number}", (1, 2, 3), SamplingParams(), (), 8), 0.0)
    while len(host.running.first.output) < outputs:
        host, _, _ = step(run, host, None, time.perf_counter)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        host, _, _ = step(run, host, None, time.perf_counter)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def add_seconds(requests: int) -> float:
    """Seconds to queue one of that many requests."""
    host, prompt = empty_host(8, 64, 7, 64), tuple(range(64))
    begin = time.perf_counter()
    for number in range(requests):
        host = add(host, Request(str(number), prompt, SamplingParams(), (), 8), 0.0)
    return (time.perf_counter() - begin) / requests


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    add_seconds(1_000)
    print("queueing a request, microseconds, by requests queued")
    for requests in (1_000, 2_000, 4_000, 8_000, 16_000):
        print(f"{requests:>8} {1e6 * add_seconds(requests):8.1f}")
    print("a step of 32 decoding requests, milliseconds")
    print(f"{'queued':>8} {'context':>8} {'outputs':>8} {'ms':>8}")
    for queued, context, outputs in (
        (0, 1_024, 0),
        (10_000, 1_024, 0),
        (0, 32_768, 0),
        (0, 1_024, 16_384),
        (10_000, 32_768, 16_384),
    ):
        print(
            f"{queued:>8} {context:>8} {outputs:>8} {1e3 * step_seconds(queued, 32, context, outputs):8.2f}", flush=True
        )


if __name__ == "__main__":
    main()
