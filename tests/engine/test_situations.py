"""Every request drafts from its own context, always: the situations an engine can get into.

Verification is lossless, so tokens cannot show a wrong draft. What is compared is what was drafted,
with drafters trained to depend on the content and the position of their context, and that a request
goes on drafting.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflash_jax import Engine, RequestError
from dflash_jax.engine.host import preempt
from tests.engine.poison import poison
from tests.pairs import (
    ALL_TRAINED,
    SAMPLING,
    SERVED,
    alone,
    assert_is_golden,
    cases,
    engine,
    prompts,
    record,
    step_in_order,
)

PAIR = "recall-dflash2"
SHORT = {**SAMPLING, "max_tokens": 5}


def run(served: Engine) -> dict:
    """Steps the engine until nothing is left; completions by id."""
    done = {}
    while served.has_work:
        for update in served.step():
            if update.completion is not None:
                done[update.id] = update.completion
    return done


@pytest.mark.parametrize("pair", SERVED)
def test_survivor_of_condense_drafts_what_it_would_have_drafted_alone(pair):
    """Situation 1: the first of two finishes, the second moves to row 0."""
    served = engine(pair)
    served.add_request(prompts(pair)[0], SHORT, request_id="first")
    served.add_request(prompts(pair)[1], SAMPLING, request_id="second")
    rows_of_second = []
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
        slot = next((p.slot for p in served.host.running if p.request.id == "second"), None)
        rows = np.asarray(served.state.rows.idx_mapping).tolist()
        if slot in rows:
            rows_of_second.append(rows.index(slot))
    assert rows_of_second[0] == 1 and rows_of_second[-1] == 0, "the second request was to be moved"
    assert_is_golden(done["second"], cases(pair)[1])
    assert all(len(block) == served.k for block in done["second"].drafted_blocks), "it stopped drafting"


@pytest.mark.parametrize("pair", [PAIR, *ALL_TRAINED])
def test_swapping_live_rows_changes_no_draft(pair):
    """Situation 2: rows of decoding requests change places between any two steps."""
    served = engine(pair)
    for index in (1, 2):
        served.add_request(prompts(pair)[index], SAMPLING, request_id=str(index))
    done, rows, turn = {}, set(), 1
    while served.host.in_flight:
        turn = 1 - turn
        step_in_order(served, lambda count, turn=turn: list(range(count))[:: -1 if turn else 1])
        rows.add((turn, *np.asarray(served.state.rows.idx_mapping).tolist()))
    assert {(0, 0, 1), (1, 1, 0)} <= rows, "the two were to change places"
    done = run(served)
    for index in (1, 2):
        assert_is_golden(done[str(index)], cases(pair)[index])


def test_decodes_keep_their_drafts_while_a_later_prompt_prefills_in_any_row_order():
    """Situation 2: decodes and chunks in one step, each in rows of their own."""
    served = engine(PAIR, prefill_chunk=16, prefix_cache=False)
    for index in (1, 2):
        served.add_request(prompts(PAIR)[index], SAMPLING, request_id=str(index))
    while not all(sequence.decoding for sequence in served.host.in_flight):
        served.step()
    served.add_request(prompts(PAIR)[3], SAMPLING, request_id="3")
    mixed = 0
    while not served.host.find("3").decoding:
        step_in_order(served, lambda count: range(count)[::-1])
        mixed += len(served.host.running) == 3
    assert mixed > 1
    done = run(served)
    for index in (1, 2, 3):
        assert_is_golden(done[str(index)], cases(PAIR)[index])


def test_a_prompt_that_ends_in_a_step_takes_no_part_in_its_round():
    """Three decode, which is run as a batch of four; the fourth row holds a prompt that ends in this very step."""
    served = engine(PAIR)
    for index in (1, 2, 1):
        served.add_request(prompts(PAIR)[index], SAMPLING)
    while sum(p.decoding for p in served.host.running) < 3:
        served.step()
    served.add_request(prompts(PAIR)[3][:32], SAMPLING, request_id="new")
    [update] = [update for update in served.step() if update.id == "new"]
    assert len(update.token_ids) == 1
    assert record(run(served)["new"]) == record(alone(PAIR, tuple(prompts(PAIR)[3][:32])))


@pytest.mark.parametrize("pair", [PAIR, *ALL_TRAINED])
def test_a_newcomer_in_a_freed_slot_has_nothing_of_its_predecessor(pair):
    """Situation 3: departure and arrival in one step, freed pages poisoned."""
    served = engine(pair, slots=1, prefix_cache=False)
    served.add_request(prompts(pair)[0], SHORT, request_id="0")
    served.add_request(prompts(pair)[2], SAMPLING, request_id="2")
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
        poison(served)
    assert_is_golden(done["2"], cases(pair)[2])


@pytest.mark.parametrize("pages", [1.5, 2, 2.9])
def test_a_shared_beginning_drafts_the_same_blocks_cold_and_warm(pages):
    """Situation 4: cold, while the donor decodes, and after it finished; whole and partial hits."""
    donor = prompts(PAIR)[3][:48]
    shared = int(pages * 16)
    other = (*donor[:shared], *prompts(PAIR)[2][5:25])
    served = engine(PAIR)
    served.add_request(donor, SAMPLING, request_id="donor")
    while not any(p.decoding for p in served.host.running):
        served.step()
    served.add_request(other, SAMPLING, request_id="while the donor decodes")
    done = run(served)
    served.add_request(other, SAMPLING, request_id="after it finished")
    done |= run(served)
    for name in ("while the donor decodes", "after it finished"):
        assert record(done[name]) == record(alone(PAIR, other))
        assert done[name].metrics.cached_tokens >= shared // 16 * 16, "the cache was not hit"
        assert done[name].metrics.drafted_request_steps == len(done[name].produced_per_round)


def test_the_same_prompt_three_times_drafts_the_same_blocks():
    """Situation 4: first and third time."""
    prompt = tuple(prompts(PAIR)[2])
    served = engine(PAIR)
    served.add_request(prompt, SAMPLING, request_id="cold")
    while not any(len(p.output) > 8 for p in served.host.running):
        served.step()
    served.add_request(prompt, SAMPLING, request_id="warm")
    done = run(served)
    served.add_request(prompt, SAMPLING, request_id="after")
    done |= run(served)
    for completion in done.values():
        assert record(completion) == record(alone(PAIR, prompt))
    assert done["after"].metrics.cached_tokens > 0
    counters, saved = served.counters(), sum(completion.metrics.cached_tokens for completion in done.values())
    assert counters["prefix_tokens_saved"] == saved == 16 * counters["prefix_hits"]
    assert counters["prefix_misses"] > 0 and counters["prefix_evictions"] == 0


def test_a_hit_survives_the_donor_and_its_poisoned_pages():
    """Situation 4: the donor goes while the hitter still reads the shared pages."""
    donor = prompts(PAIR)[3][:40]
    served = engine(PAIR)
    served.add_request(donor, SHORT, request_id="donor")
    served.step()
    served.add_request(donor, SAMPLING, request_id="hitter")
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
        poison(served)
    assert record(done["hitter"]) == record(alone(PAIR, tuple(donor)))


@pytest.mark.parametrize(("pair", "num_pages"), [(PAIR, 7), (PAIR, 9), *((pair, 7) for pair in ALL_TRAINED)])
def test_preempted_requests_resume_with_the_drafts_they_would_have_made(pair, num_pages):
    """Situation 5: three requests on a pool that cannot hold them."""
    served = engine(pair, pages=num_pages)
    completions = served.generate(prompts(pair)[:4], SAMPLING)
    assert served.host.counters.preemptions > 0, "nobody was preempted"
    for completion, case in zip(completions, cases(pair), strict=False):
        assert_is_golden(completion, case)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_alone_and_at_every_round_changes_nothing(prefix_cache):
    """Situation 5, at concurrency 1."""
    served = engine(PAIR, slots=1, prefix_cache=prefix_cache)
    served.add_request(prompts(PAIR)[0], SAMPLING, request_id="0")
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
        for sequence in served.host.running:
            # After each round; if it were after each step, it would never come to one.
            if len(sequence.produced_per_round) > sequence.preemptions:
                served.host = preempt(served.host, sequence.id)
    assert_is_golden(done["0"], cases(PAIR)[0])
    assert done["0"].metrics.preemptions > 3


@pytest.mark.parametrize("chunk", [16, 20])
def test_chunk_boundaries_in_and_on_pages_change_no_draft(chunk):
    """Situation 6."""
    served = engine(PAIR, prefill_chunk=chunk, prefix_cache=False)
    for completion, case in zip(served.generate(prompts(PAIR), SAMPLING), cases(PAIR), strict=True):
        assert_is_golden(completion, case)


def test_a_request_past_its_draft_budget_goes_on_plainly_and_says_so():
    """Situation 7: the fallback is told, counted, and costs the neighbour nothing."""
    served = engine(PAIR, max_context=60)
    long, short = prompts(PAIR)[3][:50], prompts(PAIR)[0][:10]
    completions = served.generate([long, short], {**SAMPLING, "max_tokens": 40})
    assert completions[0].token_ids == alone(PAIR, tuple(long), (("max_tokens", 40),)).token_ids
    assert "draft.max_context 60" in completions[0].fallback
    blocks = completions[0].drafted_blocks
    drafted = [bool(block) for block in blocks]
    assert drafted[0] and not drafted[-1] and drafted == sorted(drafted, reverse=True)
    assert served.host.counters.fallbacks == 1
    assert completions[1].fallback is None
    assert record(completions[1]) == record(alone(PAIR, tuple(short), (("max_tokens", 40),)))


def test_a_request_that_asks_for_no_speculation_gets_none_and_says_so():
    """Situation 7."""
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[0], {**SAMPLING, "speculation": False}, request_id="plain")
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="drafting")
    done = run(served)
    assert done["plain"].metrics.drafts_proposed == 0
    assert done["plain"].fallback == "the request asked for no speculation"
    assert list(done["plain"].token_ids) == cases(PAIR)[0]["greedy_tokens"]
    assert_is_golden(done["drafting"], cases(PAIR)[1])


def test_pages_without_a_drafts_half_are_never_shared():
    """Situation 7 with 4: what a plain request computed must not feed a drafting one."""
    prompt = prompts(PAIR)[3][:40]
    served = engine(PAIR)
    served.generate([prompt], {**SHORT, "speculation": False})
    completion = served.generate([prompt], SAMPLING)[0]
    assert record(completion) == record(alone(PAIR, tuple(prompt)))


def test_a_sliding_draft_sees_only_its_window():
    """Situation 8: contexts that differ only far outside the window give equal blocks from equal target states.

    The draft has 3 layers of window 24, so nothing further than that from the block reaches it.
    """
    pair = "recall-dflash2-swa"
    served = engine(pair, donate=False, prefix_cache=False)
    served.add_request(prompts(pair)[4], SAMPLING)
    while not any(p.decoding for p in served.host.running):
        served.step()
    twin = served.fork()
    position = int(served.state.slots.position[0])
    assert position > 40
    # Content of the draft's pages further back than any layer's window is replaced.
    far = (position - 24) // 16
    table = np.asarray(twin.state.slots.block_table)[0, :far]
    assert len(table) > 0
    kv = twin.state.draft_pages
    spoiled = kv.replace(k=kv.k.at[:, table].add(3.0), v=kv.v.at[:, table].add(3.0))
    twin.state = twin.state.replace(draft_pages=spoiled)
    block = [engine_.step() and engine_.host.running.first.drafted_blocks[-1] for engine_ in (served, twin)]
    assert block[0] == block[1]
    near = np.asarray(served.state.slots.block_table)[0, far : far + 2]
    kv = twin.state.draft_pages
    twin.state = twin.state.replace(draft_pages=kv.replace(v=kv.v.at[:, near].multiply(-3.0)))
    served.step(), twin.step()
    assert served.host.running.first.drafted_blocks[-1] != twin.host.running.first.drafted_blocks[-1]


def test_a_stop_token_inside_an_accepted_block_ends_the_request_there():
    """Situation 9."""
    case = cases(PAIR)[1]
    stop = case["greedy_tokens"][3]
    assert case["produced_per_round"][0] == 8, "the first block was to be accepted whole"
    completion = engine(PAIR).generate([case["prompt"]], {**SAMPLING, "stop_token_ids": [stop]})[0]
    assert list(completion.token_ids) == case["greedy_tokens"][:4]
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_inside_an_accepted_block_ends_the_request_there(max_tokens):
    """Situation 9."""
    case = cases(PAIR)[1]
    completion = engine(PAIR).generate([case["prompt"]], {**SAMPLING, "max_tokens": max_tokens})[0]
    assert list(completion.token_ids) == case["greedy_tokens"][:max_tokens]
    assert completion.finish_reason == "length"


def test_a_prompt_that_fills_the_model_length_gets_what_is_left():
    """Situation 9."""
    served = engine(PAIR)
    prompt = (prompts(PAIR)[4] * 3)[:159]
    completion = served.generate([prompt], SAMPLING)[0]
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")
    with pytest.raises(RequestError, match=r"160 tokens, which leaves no room to answer in engine.max_model_len 160"):
        served.add_request([*prompt, 1])


def test_prompts_of_one_token_are_served():
    """Situation 9."""
    completions = engine(PAIR).generate([[60], [7]], SAMPLING)
    plain = engine(None).generate([[60], [7]], SAMPLING)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert all(c.metrics.drafts_proposed > 0 for c in completions)


@pytest.mark.parametrize("k", [1, 10])
def test_other_block_widths_than_the_trained_one_draft_and_lose_nothing(k):
    """Situation 9."""
    served = engine(PAIR, k=k)
    completion = served.generate(prompts(PAIR)[1:2], SAMPLING)[0]
    assert list(completion.token_ids) == cases(PAIR)[1]["greedy_tokens"]
    assert all(len(block) == k for block in completion.drafted_blocks)
    assert completion.metrics.drafts_accepted > 0


def test_abort_of_a_queued_a_prefilling_and_a_decoding_request():
    """Situation 10."""
    served = engine(PAIR, slots=3, prefill_chunk=16, prefix_cache=False)
    for name, index in (("decoding", 1), ("survivor", 2)):
        served.add_request(prompts(PAIR)[index], SAMPLING, request_id=name)
    while sum(p.decoding for p in served.host.running) < 2:
        served.step()
    served.add_request((prompts(PAIR)[4] * 2)[:64], SAMPLING, request_id="prefilling")
    served.add_request(prompts(PAIR)[0], SAMPLING, request_id="queued")
    served.step()
    by_id = {sequence.id: sequence for sequence in served.host.in_flight}
    assert by_id["queued"].slot is None and not by_id["prefilling"].decoding and by_id["decoding"].decoding
    for name in ("queued", "prefilling", "decoding"):
        assert served.abort(name).finish_reason == "abort"
    done = run(served)
    assert set(done) == {"survivor"}
    assert_is_golden(done["survivor"], cases(PAIR)[2])
    assert served.host.pool.available == served.host.pool.num_pages
    with pytest.raises(RequestError, match="no request 'queued' is in flight"):
        served.abort("queued")


def test_two_hundred_requests_on_a_pool_that_fits_three_all_finish():
    """Situation 5: fair, and no livelock."""
    served = engine(PAIR, pages=12)
    queue = [prompts(PAIR)[i % 3][: 10 + i % 7] for i in range(200)]
    completions = served.generate(queue, {**SAMPLING, "max_tokens": 12})
    assert [c.finish_reason for c in completions] == ["length"] * 200


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(RequestError, match=r"grow to 107 tokens, which is 7 pages of 16, but the whole pool has 6"):
        engine(PAIR, pages=6).add_request([1] * 60, {"max_tokens": 48})


def test_an_exception_in_a_step_loses_no_request(monkeypatch):
    served = engine(PAIR)
    for index, prompt in enumerate(prompts(PAIR)):
        served.add_request(prompt, SAMPLING, request_id=str(index))
    served.step(), served.step()

    def broken(*_, **__):
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("dflash_jax.engine.run._decode_program", lambda donate: broken)
        with pytest.raises(MemoryError):
            served.step()
    served.add_request(prompts(PAIR)[0], SAMPLING, request_id="meanwhile")
    done = run(served)
    for index, case in enumerate(cases(PAIR)):
        assert_is_golden(done[str(index)], case)
    assert_is_golden(done["meanwhile"], cases(PAIR)[0])


def test_the_engine_is_not_needed_to_know_the_models_twice():
    """One set of weights may serve several engines; none of them donates it."""
    first = engine(PAIR)
    second = Engine(first.models, first.config)
    assert first.models is second.models
    assert first.generate([[60, 1, 2]], SHORT)[0].token_ids == second.generate([[60, 1, 2]], SHORT)[0].token_ids


def test_updates_join_to_the_completion():
    served = engine(PAIR)
    tokens: dict[str, tuple[int, ...]] = {}
    for update in served.stream(prompts(PAIR), SAMPLING):
        tokens[update.id] = tokens.get(update.id, ()) + update.token_ids
        if update.completion is not None:
            assert tokens[update.id] == update.completion.token_ids
    assert len(tokens) == len(prompts(PAIR))


def test_an_abandoned_stream_leaves_nothing_behind():
    served = engine(PAIR)
    for _ in served.stream(prompts(PAIR), SAMPLING):
        break
    assert not served.has_work
    assert served.host.pool.available == served.config.pool_pages


def test_metrics_count_as_vllm_does():
    completion = alone(PAIR, tuple(prompts(PAIR)[1]))
    rounds, metrics = completion.produced_per_round, completion.metrics
    assert metrics.drafted_request_steps == len(rounds)
    assert metrics.drafts_proposed == 7 * len(rounds)
    assert metrics.drafts_accepted == sum(rounds) - len(rounds)
    assert metrics.accept_rate == metrics.drafts_accepted / metrics.drafts_proposed
    assert metrics.mean_acceptance_length == 1 + metrics.drafts_accepted / len(rounds)
    assert dataclasses.asdict(metrics)["tpot_s"] > 0
