"""Targets with recurrent states: nothing rejected is ever folded in, and a state goes wherever its pages go.

The record was made without any cache, so it shows what each round must draft.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig, InvariantError
from dflash_jax.engine.check import check_state
from dflash_jax.engine.host import preempt
from dflash_jax.engine.plan import make_plan
from tests.engine.poison import poison, poison_slots
from tests.engine.test_snapshots import finish
from tests.pairs import GOLDEN, HYBRID, SAMPLING, alone, assert_is_golden, cases, engine, models, prompts, record

LONG = tuple(prompts(HYBRID)[5])


def run(served: Engine) -> dict:
    """Steps until nothing is left, with free pages and slots poisoned and everything checked; completions by id."""
    done = {}
    while served.has_work:
        done |= {update.id: update.completion for update in served.step() if update.completion}
        check_state(served.models, served.host, served.state)
        poison(served)
        poison_slots(served)
    return done


@pytest.mark.parametrize("pages", [0.5, 1, 1.5, 2, 2.9, 3.9])
def test_a_prefix_hit_drafts_the_same_blocks_cold_and_warm(pages):
    """Cold, while the donor decodes, and after it finished."""
    shared = int(pages * 16)
    other = (*LONG[:shared], *prompts(HYBRID)[2][4:24])
    served = engine(HYBRID)
    served.add_request(LONG, SAMPLING, request_id="donor")
    while not any(sequence.decoding for sequence in served.host.running):
        served.step()
    served.add_request(other, SAMPLING, request_id="while the donor decodes")
    done = run(served)
    served.add_request(other, SAMPLING, request_id="once more")
    done |= run(served)
    assert_is_golden(done["donor"], cases(HYBRID)[5])
    for name in ("while the donor decodes", "once more"):
        assert record(done[name]) == record(alone(HYBRID, other))
    # The donor's checkpoint stands at the end of its prompt; the first hitter leaves one where it departs.
    assert done["while the donor decodes"].metrics.cached_tokens == 0
    assert done["once more"].metrics.cached_tokens == (len(other) - 1) // 16 * 16


def test_a_prompt_that_departs_leaves_a_checkpoint_there_for_the_next():
    served = engine(HYBRID)
    served.generate([LONG], SAMPLING)
    branches = [
        (*LONG[:shared], *prompts(HYBRID)[4][index : index + 22]) for shared, index in ((50, 1), (50, 2), (70, 3))
    ]
    found = [served.generate([branch], SAMPLING)[0] for branch in branches]
    # The last one shares four pages with the first request, and the nearest checkpoint stands at the third.
    assert [completion.metrics.cached_tokens for completion in found] == [0, 48, 48]
    for completion, branch in zip(found, branches, strict=True):
        assert record(completion) == record(alone(HYBRID, branch))
    counters = served.counters()
    assert (counters["checkpoint_hits"], counters["checkpoint_misses"]) == (2, 1)
    assert counters["tokens_run_again"] == 48 + 16


@pytest.mark.parametrize("length", [90, 81, 65, 17])
def test_the_same_prompt_again_begins_at_its_last_page(length):
    """Of 81, 65 and 17 tokens a single one is run again: all else that it knows is in the checkpoint."""
    served = engine(HYBRID)
    for turn in range(3):
        [completion] = served.generate([LONG[:length]], SAMPLING)
        assert record(completion) == record(alone(HYBRID, LONG[:length]))
        assert completion.metrics.cached_tokens == ((length - 1) // 16 * 16 if turn else 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_at_every_round_changes_nothing(prefix_cache):
    served = engine(HYBRID, prefix_cache=prefix_cache)
    served.add_request(LONG, SAMPLING, request_id="5")
    done = {}
    while served.has_work:
        done |= {update.id: update.completion for update in served.step() if update.completion}
        poison(served)
        poison_slots(served)
        for sequence in served.host.running:
            if len(sequence.produced_per_round) > sequence.preemptions:
                served.host = preempt(served.host, sequence.id)
    assert_is_golden(done["5"], cases(HYBRID)[5])
    assert done["5"].metrics.preemptions > 3
    if prefix_cache:
        assert done["5"].metrics.cached_tokens >= 80 * done["5"].metrics.preemptions, (
            "it was to resume from a checkpoint"
        )


@pytest.mark.parametrize("num_pages", [9, 12])
def test_a_pool_that_cannot_hold_them_all(num_pages):
    served = engine(HYBRID, pages=num_pages)
    for completion, case in zip(served.generate(prompts(HYBRID)[:5], SAMPLING), cases(HYBRID), strict=False):
        assert_is_golden(completion, case)
    assert served.host.counters.preemptions > 0


@pytest.mark.parametrize("chunk", [5, 8, 16, 20])
def test_last_chunks_of_exactly_a_blocks_length_are_chunks(chunk):
    """Prompts of 8, 24 and 40 tokens in chunks of 8: the shape of a block to verify, but all of it is committed."""
    served = engine(HYBRID, prefill_chunk=chunk, prefix_cache=False)
    for completion, case in zip(served.generate(prompts(HYBRID), SAMPLING), cases(HYBRID), strict=True):
        assert_is_golden(completion, case)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 32, 33])
def test_prompts_of_every_length_decode_as_they_do_plainly(length):
    prompt = LONG[:length]
    plain = alone(HYBRID, prompt, (("speculation", False),))
    assert alone(HYBRID, prompt).token_ids == plain.token_ids


def test_a_stop_inside_a_block_ends_there_and_the_next_request_begins_clean():
    case = cases(HYBRID)[1]
    served = engine(HYBRID, slots=1)
    stop = case["greedy_tokens"][3]
    served.add_request(case["prompt"], {**SAMPLING, "stop_token_ids": [stop]}, request_id="stopped")
    served.add_request(cases(HYBRID)[2]["prompt"], SAMPLING, request_id="2")
    done = run(served)
    assert list(done["stopped"].token_ids) == case["greedy_tokens"][: case["greedy_tokens"].index(stop) + 1]
    assert_is_golden(done["2"], cases(HYBRID)[2])


def test_sampled_rows_beside_greedy_ones():
    served = engine(HYBRID)
    sampled = {**SAMPLING, "temperature": 0.9, "seed": 11}
    for index in (1, 2, 3):
        served.add_request(prompts(HYBRID)[index], SAMPLING, request_id=str(index))
    served.add_request(prompts(HYBRID)[0], sampled, request_id="sampled")
    done = run(served)
    for index in (1, 2, 3):
        assert_is_golden(done[str(index)], cases(HYBRID)[index])
    assert record(done["sampled"]) == record(alone(HYBRID, tuple(prompts(HYBRID)[0]), tuple(sampled.items())))


def test_snapshots_and_forks_in_the_middle(tmp_path):
    served = engine(HYBRID, slots=3)
    for index, prompt in enumerate(prompts(HYBRID)):
        served.add_request(prompt, SAMPLING, request_id=str(index))
    for _ in range(6):
        served.step()
    served.snapshot(tmp_path / "snapshot")
    for one in (served.fork(), Engine.restore(tmp_path / "snapshot", engine(HYBRID)), served):
        check_state(one.models, one.host, one.state)
        for index, completion in finish(one).items():
            assert_is_golden(completion, cases(HYBRID)[int(index)])


@pytest.mark.parametrize("sizes", [{"checkpoints": 0}, {"prefix_cache": False}])
def test_an_engine_without_checkpoints_has_snapshots_like_any(tmp_path, sizes):
    served = engine(HYBRID, **sizes)
    served.add_request(prompts(HYBRID)[4], SAMPLING, request_id="4")
    for _ in range(6):
        served.step()
    served.snapshot(tmp_path / "snapshot")
    restored = Engine.restore(tmp_path / "snapshot", engine(HYBRID, **sizes))
    check_state(restored.models, restored.host, restored.state)
    assert jax.tree.structure(restored.state) == jax.tree.structure(served.state)
    for one in (restored, Engine.restore(tmp_path / "snapshot", engine(HYBRID, **sizes), draft=GOLDEN / HYBRID)):
        assert_is_golden(finish(one)["4"], cases(HYBRID)[4])


def test_a_fork_without_a_draft_rebuilds_the_states():
    served = engine(HYBRID)
    served.add_request(prompts(HYBRID)[4], SAMPLING, request_id="4")
    for _ in range(7):
        served.step()
    assert list(finish(served.fork(draft=None))["4"].token_ids) == cases(HYBRID)[4]["greedy_tokens"]


def test_a_snapshot_rebuilt_in_an_engine_with_fewer_checkpoints_counts_those_there_are(tmp_path):
    served = engine(HYBRID, checkpoints=5)
    served.add_request(LONG, SAMPLING, request_id="5")
    served.step()
    served.snapshot(tmp_path / "snapshot")
    restored = Engine.restore(tmp_path / "snapshot", engine(HYBRID, checkpoints=2), draft=GOLDEN / HYBRID)
    assert restored.host.checkpoints.capacity == restored.state.checkpoints.lengths.shape[0] == 2
    assert_is_golden(run(restored)["5"], cases(HYBRID)[5])


def test_thirty_two_at_once_with_k_8_are_as_alone():
    sizes = {"max_slots": 32, "max_model_len": 64, "prefill_chunk": 1024}
    served = engine(HYBRID, k=8, **sizes)
    queue = [LONG[i : i + 12 + i % 9] for i in range(32)]
    completions = served.generate(queue, {**SAMPLING, "max_tokens": 20})
    assert served.host.counters.preemptions == 0
    solo = engine(HYBRID, k=8, **sizes)
    for index, (completion, prompt) in enumerate(zip(completions, queue, strict=True)):
        assert completion.finish_reason == "length"
        assert completion.token_ids == alone(HYBRID, prompt, (("max_tokens", 20), ("speculation", False))).token_ids
        if index % 8 == 0:
            assert record(solo.generate([prompt], {**SAMPLING, "max_tokens": 20})[0]) == record(completion)


def decoding(index: int = 1, **sizes) -> Engine:
    served = engine(HYBRID, **sizes)
    served.add_request(prompts(HYBRID)[index], SAMPLING, request_id=str(index))
    while not served.host.find(str(index)).decoding:
        served.step()
    return served


def test_a_round_folds_what_was_accepted_and_nothing_else():
    """The state after a round is, bit for bit, that of the same tokens decoded one by one."""
    served, plain = decoding(3), decoding(3)
    plain = plain.fork(draft=None)
    while not plain.host.running or not plain.host.running.first.decoding:
        plain.step()
    for _ in range(5):
        served.step()
        position = int(served.state.slots.position[0])
        while int(plain.state.slots.position[0]) < position:
            plain.step()
        assert int(plain.state.slots.position[0]) == position == int(served.state.slots.folded[0])
        states = (jax.tree.map(lambda leaf: leaf[:, 0], one.state.recurrent) for one in (served, plain))
        jax.tree.map(np.testing.assert_array_equal, *states)


def test_verification_alone_writes_no_state():
    served = decoding(donate=False)
    before = served.state
    position = int(before.slots.position[0])
    served.step()
    after = served.state
    assert int(after.slots.position[0]) > position
    # Slots that nobody has are as they were, all of them.
    for old, new in zip(jax.tree.leaves(before.recurrent), jax.tree.leaves(after.recurrent), strict=True):
        np.testing.assert_array_equal(old[:, 1:], new[:, 1:])


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_took_in_another_number_of_tokens_is_noticed(strict):
    served = decoding(strict=strict)
    slots = served.state.slots
    served.state = served.state.replace(slots=slots.replace(folded=slots.folded.at[0].add(-1)))
    with pytest.raises(InvariantError, match=r"^recurrent_continuity"):
        check_state(served.models, served.host, served.state)
    if strict:
        with pytest.raises(InvariantError, match=r"^recurrent_continuity is violated"):
            served.step()
    else:
        [completion] = finish(served).values()
        assert completion.error.startswith("recurrent_continuity is violated")


def test_a_checkpoint_of_another_length_is_noticed():
    served = engine(HYBRID)
    served.generate([LONG], SAMPLING)
    kept = served.state.checkpoints
    [checkpoint] = served.host.checkpoints.known
    spoiled = kept.replace(lengths=kept.lengths.at[checkpoint.index].add(16))
    served.state = served.state.replace(checkpoints=spoiled)
    with pytest.raises(InvariantError, match=r"^checkpoint_length"):
        check_state(served.models, served.host, served.state)
    with pytest.raises(InvariantError, match="recurrent_continuity"):
        served.generate([LONG], SAMPLING)


def test_a_checkpoint_that_a_waiting_request_begins_with_is_not_given_to_another():
    """Admitted, but its first chunk has not run: its checkpoint stays until then."""
    served = engine(HYBRID, checkpoints=1, prefill_chunk=16)
    served.generate([LONG], SAMPLING)
    other = tuple(prompts(HYBRID)[4])
    served.add_request(other, SAMPLING, request_id="other")
    served.add_request(LONG, SAMPLING, request_id="again")
    host, _ = make_plan(served.host)
    assert host.find("again").load is not None and not host.find("again").opened
    done = run(served)
    assert_is_golden(done["again"], cases(HYBRID)[5])
    assert_is_golden(done["other"], cases(HYBRID)[4])
    assert done["again"].metrics.cached_tokens == 80


def test_without_room_for_checkpoints_the_prefix_cache_saves_nothing_and_loses_nothing():
    served = engine(HYBRID, checkpoints=0)
    for _ in range(2):
        [completion] = served.generate([LONG], SAMPLING)
        assert_is_golden(completion, cases(HYBRID)[5])
        assert completion.metrics.cached_tokens == 0
    assert served.counters()["checkpoint_misses"] == 1


def test_checkpoints_give_way_to_newer_ones():
    served = engine(HYBRID, checkpoints=2)
    for index in (3, 4, 5, 3):
        [completion] = served.generate([prompts(HYBRID)[index]], SAMPLING)
        assert_is_golden(completion, cases(HYBRID)[index])
        check_state(served.models, served.host, served.state)
    assert served.host.checkpoints.evictions >= 2


def test_one_budget_of_memory_sizes_pages_states_and_checkpoints():
    of = models(HYBRID)
    for mebibytes in (8, 24):
        served = Engine(of, EngineConfig(max_slots=4, max_model_len=160, memory=f"{mebibytes}MiB"))
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(served.state))
        assert 0.95 * mebibytes * 2**20 < held <= 1.001 * mebibytes * 2**20
        assert served.host.checkpoints.capacity > 0
    with pytest.raises(Exception, match=r"engine\.memory is 65536 bytes, but 4 slots"):
        Engine(of, EngineConfig(max_slots=4, max_model_len=160, memory="64KiB"))


def test_a_plan_cuts_chunks_where_states_are_kept():
    served = engine(HYBRID)
    served.add_request(LONG, SAMPLING)
    host, plan = make_plan(served.host)
    assert len(plan.chunks[0].tokens) == 80 and plan.chunks[0].save is not None and not plan.chunks[0].last
    assert dataclasses.replace(plan.chunks[0], tokens=()).slot == 0
    assert len(host.checkpoints.free) == host.checkpoints.capacity - 1
