"""The engine as functions of its two halves, for notebooks, tests and custom engines.

The whole state is the pair `(host, device)`. `step` calls `make_plan`, a `Runner` and `absorb`, each of which may be
called on its own. By default nothing is donated, so every state they return stays valid:

    host, device = init(models, config)
    host = add(host, Request("mine", tuple(tokens), SamplingParams(), (), limit=40), now=0.0)
    run = Runner(models)
    host, device, updates = step(run, host, device, time.perf_counter)

Rounds without the host, as in `jax.lax.scan`, need pages for every token they may commit. The caller allocates
these with `reserve`:

    host, plan = reserve(host, rounds=20)
    device = place_rounds(device, plan)
    device, reports = jax.lax.scan(lambda state, _: run_round(models, state, drafts=plan.drafts), device, length=20)
    host, updates = absorb(host, plan, StepReport(decode=jax.device_get(reports)), now=1.0)

A round without a page for a token writes nothing: it ends the request with `block_table_covers`.
`check_state` asserts every invariant of a pair.
"""

from __future__ import annotations

from dflash_jax.engine.absorb import absorb
from dflash_jax.engine.check import check_state
from dflash_jax.engine.host import HostState, Policy, add, preempt, remove, restart
from dflash_jax.engine.init import init
from dflash_jax.engine.plan import Plan, make_plan, reserve
from dflash_jax.engine.request import Request, SamplingParams
from dflash_jax.engine.run import Runner, StepReport, place_rounds, step
from dflash_jax.engine.state import EngineState, Models, init_state
from dflash_jax.engine.steps import Report, prefill, run_round, run_rounds

__all__ = [
    "EngineState",
    "HostState",
    "Models",
    "Plan",
    "Policy",
    "Report",
    "Request",
    "Runner",
    "SamplingParams",
    "StepReport",
    "absorb",
    "add",
    "check_state",
    "init",
    "init_state",
    "make_plan",
    "place_rounds",
    "preempt",
    "prefill",
    "remove",
    "reserve",
    "restart",
    "run_round",
    "run_rounds",
    "step",
]
