"""Timelines, replays, and where two runs part."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig, RequestError, StateError
from dflash_jax.analysis import diff, finish, recording, replay
from dflash_jax.checkpoints import load_draft
from tests.pairs import GOLDEN, HYBRID, SAMPLING, SIZES, alone, engine, models, prompts, record
from tests.slow import mostly_slow

PAIR = "recall-dflash2"


def halfway(draft=PAIR, sampling=None, steps=4, count=2, **options):
    served = engine(draft, **options)
    for at, prompt in enumerate(prompts(draft)[:count]):
        served.add_request(prompt, {**SAMPLING, **(sampling or {})}, request_id=f"r{at}")
    for _ in range(steps):
        served.step()
    return served


def test_a_timeline_has_every_request_in_its_slot_and_row_of_every_step():
    served = engine(PAIR, slots=2, prefix_cache=False)
    for at, (prompt, tokens) in enumerate(zip(prompts(PAIR)[:4], (1, 12, 30, 8), strict=True)):
        served.add_request(prompt, {**SAMPLING, "max_tokens": tokens}, request_id=f"r{at}")
    mappings, done = [], {}
    with recording(served) as recorder:
        while served.has_work:
            done |= {update.id: update.completion for update in served.step() if update.completion}
            mappings.append(np.asarray(served.state.rows.idx_mapping))
    served.generate([prompts(PAIR)[0]], {"max_tokens": 4})
    found = recorder.timeline
    assert len(found.steps) == len(mappings), "it ends with the block"
    assert set(found.requests) == {"r0", "r1", "r2", "r3"}
    slots, rows = found.slots(), found.rows()
    assert slots.shape == (len(mappings), 2)
    for step, mapping in zip(found.steps, mappings, strict=True):
        last = [work for work in step.rows if work.kind == "decode"] or step.rows
        assert {work.row: work.slot for work in last} == {row: slot for row, slot in enumerate(mapping) if slot >= 0}
    of = {name: {work.slot for step in found.steps for work in step.rows if work.request == name} for name in done}
    assert all(len(slots) == 1 for slots in of.values()), "a request keeps its slot"
    produced = {name: 0 for name in done}
    for step in found.steps:
        for work in step.rows:
            produced[work.request] += work.tokens if work.kind == "decode" else 0
    assert produced == {name: len(one.token_ids) - 1 for name, one in done.items()}
    assert [name for step in found.steps for name in step.finished] == [*done]
    assert found.steps[0].waiting == ("r2", "r3") and found.steps[-1].waiting == ()
    assert (rows.max(), found.rows("prefill").max()) == (3, 3) and (
        np.diff([s.seconds for s in found.steps]) >= 0
    ).all()


def test_a_timeline_tells_of_preemptions():
    served = engine(PAIR, pages=8, prefix_cache=False)
    with recording(served) as recorder:
        served.generate(prompts(PAIR)[:3], SAMPLING)
    preempted = [name for step in recorder.timeline.steps for name in step.preempted]
    assert len(preempted) == served.counters()["preemptions"] > 0


def test_an_observer_is_of_one_engine_and_a_fork_is_not_observed():
    served, seen = halfway(), []
    unsubscribe = served.subscribe(lambda before, after, updates: seen.append((before, after, updates)))
    twin, before = served.fork(), served.host
    finish(twin)
    assert not seen
    updates = served.step()
    assert seen == [(before, seen[0][1], updates)] and len(seen[0][1].running) == len(served.host.running)
    unsubscribe()
    served.step()
    assert len(seen) == 1


def test_what_a_step_brought_is_not_lost_if_an_observer_raises():
    served = halfway()

    def fail(*_):
        raise OSError("the disk is full")

    unsubscribe = served.subscribe(fail)
    with pytest.raises(OSError):
        served.step()
    unsubscribe()
    done = finish(served)
    assert [record(done[f"r{at}"]) for at in range(2)] == [record(alone(PAIR, tuple(p))) for p in prompts(PAIR)[:2]]


@pytest.mark.parametrize("draft", mostly_slow(PAIR, HYBRID))
def test_a_replay_of_nothing_changed_is_the_run_itself(draft):
    served = halfway(draft)
    before = served.host
    again = finish(replay(served))
    assert served.host is before, "the engine stays as it is"
    assert {name: record(one) for name, one in finish(served).items()} == {
        name: record(one) for name, one in again.items()
    }


def test_a_replay_goes_on_from_a_held_state_and_from_a_snapshot(tmp_path):
    served = Engine(models(PAIR), EngineConfig(**{**SIZES, "donate": False}))
    for prompt in prompts(PAIR)[:2]:
        served.add_request(prompt, SAMPLING)
    served.step()
    held = served.host, served.state
    served.snapshot(tmp_path / "snapshot")
    wanted = [record(one) for one in finish(served).values()]
    assert [record(one) for one in finish(replay(served, at=held)).values()] == wanted
    assert [record(one) for one in finish(replay(served, at=tmp_path / "snapshot")).values()] == wanted
    [small, *_] = finish(replay(served, at=held, k=3)).values()
    assert small.token_ids == wanted[0][0] and {len(block) for block in small.drafted_blocks} == {3}
    with pytest.raises(StateError, match="replay was given no engine"):
        replay()
    donating = halfway()
    held = donating.host, donating.state
    donating.step()
    with pytest.raises(StateError, match="the held state's memory was used again by a later step"):
        replay(donating, at=held)


def test_a_replay_with_another_drafter_drafts_what_that_would_have_drafted():
    served = halfway()
    other = finish(replay(served, draft=load_draft(GOLDEN / "recall-dflash1")))
    for at, prompt in enumerate(prompts(PAIR)[:2]):
        assert other[f"r{at}"].token_ids == alone(PAIR, tuple(prompt)).token_ids
    plain = finish(replay(halfway(steps=1), draft=None))
    assert [plain[f"r{at}"].token_ids for at in range(2)] == [
        alone(PAIR, tuple(p)).token_ids for p in prompts(PAIR)[:2]
    ]


@pytest.mark.parametrize("draft", mostly_slow(PAIR, HYBRID))
def test_a_replay_with_a_forced_token_says_what_a_prompt_with_that_token_would_get(draft):
    served = halfway(draft)
    output = tuple(served.host.find("r0").output)
    index, token = 3, (output[3] + 1) % 56
    done = finish(replay(served, request_id="r0", force=(index, token)))["r0"]
    assert done.token_ids[:4] == (*output[:3], token)
    rest = engine(draft).generate([[*prompts(draft)[0], *output[:3], token]], {**SAMPLING, "max_tokens": 44})[0]
    assert done.token_ids[4:] == rest.token_ids
    assert sum(done.produced_per_round) == 44, "its rounds are those after the token"
    untouched = finish(served)
    assert untouched["r0"].token_ids[: len(output)] == output


def test_a_forced_token_without_an_index_comes_next():
    served = halfway(count=1)
    output = tuple(served.host.find("r0").output)
    assert finish(replay(served, force=7))["r0"].token_ids[: len(output) + 1] == (*output, 7)


@pytest.mark.parametrize("draft", mostly_slow(PAIR, HYBRID))
def test_a_replay_with_other_sampling_samples_from_there_on(draft):
    served = halfway(draft)
    sampled = finish(replay(served, sampling={"temperature": 6.0, "seed": 3}))
    again = finish(replay(served, sampling={"temperature": 6.0, "seed": 3}))
    greedy = finish(replay(served, sampling={}))
    plain = finish(served)
    for name, one in plain.items():
        assert record(greedy[name]) == record(one), "the same sampling changes nothing"
        assert sampled[name].token_ids == again[name].token_ids != one.token_ids
    assert finish(replay(halfway(draft), sampling={"max_tokens": 30}))["r1"].token_ids == plain["r1"].token_ids[:30]


def test_a_replay_says_what_cannot_be_forced():
    served = halfway()
    with pytest.raises(RequestError, match=r"forced on one request, and 2 are in flight: \['r0', 'r1'\]"):
        replay(served, force=3)
    with pytest.raises(RequestError, match="no request 'x' is in flight"):
        replay(served, request_id="x", force=3)
    with pytest.raises(RequestError, match="forced token 64 is outside the vocabulary of 64 tokens"):
        replay(served, request_id="r0", force=64)
    with pytest.raises(RequestError, match=r"at index 99 of the output of request 'r0', which has \d+ tokens"):
        replay(served, request_id="r0", force=(99, 3))
    with pytest.raises(RequestError, match="and may have 2, so it cannot go on; give it a larger max_tokens"):
        replay(served, request_id="r0", sampling={"max_tokens": 2})


def test_runs_that_are_the_same_do_not_differ_wherever_their_requests_lie():
    first = halfway()
    second = engine(PAIR, prefix_cache=False)
    second.add_request(prompts(PAIR)[3], {**SAMPLING, "max_tokens": 3}, request_id="before")
    second.step()
    for at in (1, 0):
        second.add_request(prompts(PAIR)[at], SAMPLING, request_id=f"r{at}")
    while second.host.find("r0") is None or len(second.host.find("r0").output) < len(first.host.find("r0").output):
        second.step()
    assert first.slot_of("r0") != second.slot_of("r0") or first.state is not second.state
    assert diff(first, first) is None
    found = diff(first, second)
    assert found is None or found.request == "before" or found.leaf == "rounds"


def test_a_difference_is_told_by_request_round_and_leaf():
    served = halfway()
    slot = served.slot_of("r1")
    table = [int(page) for page in served.state.slots.block_table[slot] if page >= 0]
    page, pages = table[0], served.state.draft_pages
    broken = served.fork()
    broken.state = broken.state.replace(draft_pages=pages.replace(k=pages.k.at[:, jnp.array(table)].set(0.0)))
    rounds = len(served.host.find("r1").produced_per_round)
    found = diff(served, broken)
    assert (found.request, found.round) == ("r1", rounds + 1)
    assert found.leaf == "drafted" and any(one.leaf.startswith("draft_pages.k") for one in found.leaves)
    assert str(found).startswith(f"request 'r1' differs in round {rounds + 1}: drafted[")
    # Where nothing was drafted otherwise yet, the pages alone tell.
    slight = served.fork()
    slight.state = slight.state.replace(draft_pages=pages.replace(k=pages.k.at[0, page, 2, 0, 1].add(1e-6)))
    found = diff(served, slight)
    assert (found.leaf, found.leaves[0].index) == ("draft_pages.k", (0, 2, 0, 1))
    assert found.leaves[0].largest == pytest.approx(1e-6, rel=0.2)
    assert diff(served, slight, atol=1e-4) is None
    assert float(jnp.abs(served.state.draft_pages.k[:, page]).max()) > 0, "the engines stay as they are"


def test_another_k_and_another_text_differ_where_they_should():
    served = halfway()
    found = diff(served, replay(served, k=3))
    assert found.leaf == "drafted" and "verified" in {one.leaf for one in found.leaves}
    found = diff(served, replay(served, sampling={"temperature": 3.0, "seed": 1}))
    assert found.leaf in ("drafted", "produced")
    assert "slots.sampler.temperature" in {one.leaf for one in found.leaves}
    found = diff(served, replay(served, request_id="r0", sampling={"max_tokens": 40}))
    assert found.request == "r0" and found.leaf == "slots.tokens_left"
