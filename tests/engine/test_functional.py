"""The engine as functions of its two halves."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from dflash_jax import functional as fn
from dflash_jax.engine.output import join_updates
from tests.pairs import SAMPLING, assert_is_golden, cases, engine, models, prompts

PAIR = "recall-dflash2"


def start(pair: str | None = PAIR, indices=(1, 2), **sizes):
    """Both halves with some of the golden requests in them, all decoding, and a runner."""
    host, device = fn.init(models(pair), engine(pair, **sizes).config)
    for index in indices:
        request = fn.Request(str(index), tuple(prompts(PAIR)[index]), fn.SamplingParams(**SAMPLING), (), 48)
        host = fn.add(host, request, now=0.0)
    run = fn.Runner(models(pair))
    ticks = itertools.count()
    while not all(sequence.decoding for sequence in host.in_flight):
        host, device, _ = fn.step(run, host, device, lambda: float(next(ticks)))
    return run, host, device


def finish(run, host, device) -> dict:
    done = {}
    while host.in_flight:
        host, device, updates = fn.step(run, host, device, lambda: 0.0)
        done |= {update.id: update.completion for update in updates if update.completion}
    return done


def test_steps_of_functions_are_the_golden_record():
    for index, completion in finish(*start()).items():
        assert_is_golden(completion, cases(PAIR)[int(index)])


@pytest.mark.parametrize("pair", ["recall-dflash2", "recall-dflash1", "recall-dflash2-swa"])
def test_a_scan_over_rounds_on_a_reserved_state_is_what_the_engine_does(pair):
    run, host, device = start(pair)
    host, plan = fn.reserve(host, rounds=20)
    device = fn.place_rounds(device, plan)

    def one_round(state, _):
        return fn.run_round(run.models, state, drafts=plan.drafts)

    device, reports = jax.jit(lambda state: jax.lax.scan(one_round, state, length=20))(device)
    report = fn.StepReport(decode=jax.device_get(reports))
    host, updates = fn.absorb(host, plan, report, now=1.0)
    done = {update.id: update.completion for update in updates if update.completion}
    fn.check_state(models(pair), host, device)
    done |= finish(run, host, device)
    for completion in engine(pair, prefix_cache=False).generate([prompts(PAIR)[1], prompts(PAIR)[2]], SAMPLING):
        mine = done[str(1 + int(completion.id.removeprefix("request-")))]
        assert mine.token_ids == completion.token_ids
        assert mine.produced_per_round == completion.produced_per_round
        assert mine.drafted_blocks == completion.drafted_blocks


def test_rounds_without_reserved_pages_end_the_request_and_touch_no_other():
    run, host, device = start(indices=(1,), page_size=4)
    host, plan = fn.reserve(host, rounds=1)
    device = fn.place_rounds(device, plan)
    pages = set(range(device.target_pages.k.shape[1])) - set(host.running.first.pages)
    before = np.asarray(device.target_pages.k)[:, sorted(pages)]
    for _ in range(6):
        device, report = fn.run_round(run.models, device, drafts=plan.drafts)
    assert int(report.produced[0]) == 0
    assert int(device.slots.violation[0]) == 3, "block_table_covers"
    assert np.array_equal(np.asarray(device.target_pages.k)[:, sorted(pages)], before)


def test_a_step_leaves_the_halves_from_before_as_they_were():
    run, host, device = start()
    kept_host, kept = (tuple(host.running), tuple(host.pool.free.items())), jax.device_get(device)
    after = fn.step(run, host, device, lambda: 0.0)
    again = fn.step(run, host, device, lambda: 0.0)
    assert (tuple(host.running), tuple(host.pool.free.items())) == kept_host
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(device), kept)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after[1]), jax.device_get(again[1]))
    assert after[2] == again[2] and list(after[0].running) == list(again[0].running)


def test_a_step_is_at_most_two_dispatches_whatever_it_does(monkeypatch):
    """Admission, preemption, pages and rows go in with the prompts' chunks and the rounds."""
    served = engine(PAIR, pages=9, prefill_chunk=16)
    count = {"runs": 0}
    for name in ("_prefill_program", "_decode_program"):
        program = getattr(__import__("dflash_jax.engine.run", fromlist=[name]), name)

        def counted(donate, program=program):
            def run(*args, **kwargs):
                count["runs"] += 1
                return program(donate)(*args, **kwargs)

            return run

        monkeypatch.setattr(f"dflash_jax.engine.run.{name}", counted)
    for prompt in prompts(PAIR):
        served.add_request(prompt, SAMPLING)
    served.step()
    with jax.log_compiles(False), jax.transfer_guard_device_to_host("allow"):
        while served.has_work:
            count["runs"] = 0
            served.step()
            assert count["runs"] <= 2
    assert served.host.counters.preemptions > 0


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("context_continuity", {"draft_len": 2}),
        ("position_monotone", {"position": 3}),
        ("slot_entry", {"anchor": 63}),
        ("slot_entry", {"tokens_left": 1}),
        ("block_table_covers", {"block_table": -1}),
    ],
)
def test_check_state_names_what_does_not_hold(name, spoil):
    _, host, device = start()
    fn.check_state(models(PAIR), host, device)
    [(field, value)] = spoil.items()
    leaf = getattr(device.slots, field).at[host.running.first.slot].set(value)
    spoiled = device.replace(slots=device.slots.replace(**{field: leaf}))
    with pytest.raises(AssertionError, match=f"^{name}: request '1'"):
        fn.check_state(models(PAIR), host, spoiled)


def test_check_state_notices_a_state_of_another_structure():
    _, host, device = start()
    with pytest.raises(AssertionError, match=r"^state_structure"):
        fn.check_state(models(PAIR), host, device.replace(draft_pages=None))


def test_joined_updates_are_the_updates_one_after_the_other():
    run, host, device = start(indices=(1,))
    pending, tokens = host.undelivered, ()
    while host.in_flight:
        host, device, updates = fn.step(run, host, device, lambda: 0.0)
        pending = join_updates(pending, updates)
        tokens += tuple(token for update in updates for token in update.token_ids)
    [update] = pending
    assert update.token_ids == tokens and update.completion.token_ids[-len(tokens) :] == tokens


def test_the_example_in_the_docs_of_the_module_runs(capsys):
    """Its code, cut out of the docstring."""
    lines = [line[4:] for line in fn.__doc__.splitlines() if line.startswith("    ")]
    names = {
        **vars(fn),
        "models": models(PAIR),
        "config": engine(PAIR).config,
        "tokens": prompts(PAIR)[1],
        "jax": jax,
        "time": __import__("time"),
    }
    split = next(i for i, line in enumerate(lines) if "reserve" in line)
    exec("\n".join(lines[:split]), names)
    while not all(sequence.decoding for sequence in names["host"].in_flight):
        exec(lines[split - 1], names)
    exec("\n".join(lines[split:]), names)
    assert names["updates"][0].completion.finish_reason == "length"
