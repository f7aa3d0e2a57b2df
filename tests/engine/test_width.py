"""How many drafted tokens are verified: it changes no token and no draft, only time."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from dflash_jax import ConfigError, Engine, EngineConfig
from dflash_jax.engine.calibration import uncalibrated
from dflash_jax.engine.costs import Costs, Round, context_of, costs_from_json
from dflash_jax.engine.width import Width, choose_width, inexperienced, widths
from tests.engine.budgets import Rounds, assert_blocks_belong, with_budget
from tests.engine.test_toy_drafter import toy_models
from tests.pairs import HYBRID, SAMPLING, SIZES, alone, cases, engine, models, prompts
from tests.slow import mostly_slow

PAIRS = ("recall-dflash2", "recall-dflash1", HYBRID)


def generate(pair: str, served: Engine, count: int = 3):
    asked = prompts(pair)[:count]
    completions = served.generate(asked, SAMPLING)
    for completion, case in zip(completions, cases(pair), strict=False):
        assert list(completion.token_ids) == case["greedy_tokens"]
    return completions


@pytest.mark.parametrize("pair", mostly_slow(*PAIRS[1:], PAIRS[0]))
def test_a_fixed_width_verifies_so_many_and_drafts_the_whole_block(pair):
    for width in (1, 3):
        for prompt, completion in zip(prompts(pair), generate(pair, engine(pair, width=width)), strict=False):
            assert set(completion.verified_per_round) == {width}
            assert all(len(block) == 7 for block in completion.drafted_blocks)
            assert max(completion.produced_per_round) == 1 + width
            assert_blocks_belong(pair, prompt, completion)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_budget_goes_to_whole_rows_and_parts_of_rows_and_changes_nothing(pair):
    served = with_budget(engine(pair), lambda plan: 2 * len(plan.decodes) + 3)
    completions = generate(pair, served)
    for prompt, completion in zip(prompts(pair), completions, strict=False):
        assert_blocks_belong(pair, prompt, completion)
    for plan in served._run.plans:
        assert not plan.decodes or plan.tokens == 2 * len(plan.decodes) + 3
    widths_seen = Counter(width for completion in completions for width in completion.verified_per_round)
    assert len(widths_seen) > 3, f"all rows got the same: {widths_seen}"


@pytest.mark.parametrize("pair", PAIRS)
def test_rounds_without_a_draft_keep_up_the_context_of_the_next_draft(pair):
    """Every third round drafts; it drafts from all tokens, those of plain rounds included."""
    counter = iter(range(10**6))
    served = with_budget(engine(pair), lambda plan: len(plan.decodes) * (8 if next(counter) % 3 == 0 else 1))
    for prompt, completion in zip(prompts(pair), generate(pair, served), strict=False):
        blocks = [block for block in completion.drafted_blocks if block]
        assert len(blocks) > 2 and () in completion.drafted_blocks
        assert completion.fallback is None
        assert_blocks_belong(pair, prompt, completion)


def test_metrics_count_what_was_verified():
    pair = "recall-dflash2"
    completion = generate(pair, engine(pair, width=2), 1)[0]
    metrics = completion.metrics
    assert metrics.drafts_proposed == 2 * len(completion.drafted_blocks)
    assert metrics.drafts_accepted == sum(completion.produced_per_round) - len(completion.produced_per_round)
    assert metrics.drafted_request_steps == len(completion.drafted_blocks)


@pytest.mark.parametrize("width", [0, 8, -1])
def test_a_width_that_the_block_does_not_have_is_refused(width):
    with pytest.raises(ConfigError, match=f"draft.width is {width}; it must be from 1 to the 7 drafted tokens"):
        Engine(models("recall-dflash2"), EngineConfig(**SIZES), width=width)


def test_a_snapshot_goes_on_with_what_was_learnt(tmp_path):
    served = engine("recall-dflash2", width="auto")
    served.generate(prompts("recall-dflash2")[:3], SAMPLING)
    served.snapshot(tmp_path / "snapshot")
    restored = Engine.restore(tmp_path / "snapshot", engine=engine("recall-dflash2", width="auto"))
    before, after = served.host.experience, restored.host.experience
    np.testing.assert_array_equal(before.calibration.seen, after.calibration.seen)
    np.testing.assert_array_equal(before.calibration.recent, after.calibration.recent)
    assert before.costs.samples == after.costs.samples
    assert served.fork(k=3).host.experience.calibration.seen.shape[0] == 3


@pytest.mark.parametrize(
    ("draft_costs", "chosen"), [(0.0, (7, 32)), (9.0, (0, 4))], ids=["tokens are free", "the draft is dear"]
)
def test_an_engine_chooses_by_what_rounds_cost(draft_costs, chosen):
    """Time is made up."""
    pair = "recall-dflash2"
    served = engine(pair, width="auto")
    served._run = Rounds(served._run, seconds=lambda plan: 1.0 + draft_costs * (plan.drafts > 0))
    asked = [prompt for prompt in prompts(pair)[:4] for _ in range(4)]
    for prompt, completion in zip(asked, served.generate(asked, SAMPLING), strict=True):
        assert completion.token_ids == alone(pair, tuple(prompt), tuple(SAMPLING.items())).token_ids
        assert_blocks_belong(pair, prompt, completion)
    late = [plan for plan in served._run.plans if len(plan.decodes) == 4][-8:]
    assert Counter((plan.drafts, plan.tokens or 4 * (1 + plan.width)) for plan in late).most_common(1)[0][0] == chosen


# Choosing, without a model.


def known(seconds: dict[Width, float], *, rows: int, drafts: int, margins_bin: int = 5, context: int = 0):
    """Experience of rounds that took so long, of drafts that are as sure as that."""
    costs = Costs()
    for width, each in seconds.items():
        for _ in range(8):
            costs = costs.with_round(Round(rows, width.tokens, width.drafts > 0, context), each)
    bins = np.full((64, drafts), margins_bin, np.int32)
    calibration = uncalibrated(drafts).with_blocks(bins, np.full(64, drafts), np.full(64, drafts // 2))
    return dataclasses.replace(inexperienced(drafts), calibration=calibration, costs=costs)


def choose(experience, rows, drafts, **more):
    return choose_width(
        experience, **{"rows": rows, "live": rows, "drafting": rows, "drafts": drafts, "context": 0, **more}
    )


def test_the_widths_to_choose_from():
    assert widths(1, 3) == ((0, 1), (3, 2), (3, 4))
    assert widths(8, 7) == ((0, 8), (7, 16), (7, 32), (7, 64))
    assert widths(4, 4) == ((0, 4), (4, 8), (4, 16), (4, 20))


def test_the_width_that_brings_most_tokens_a_second_is_chosen():
    none, two, four, all_ = widths(8, 7)
    # Half of each block is kept: 1 of 1, 3 of 3, and no more than 3 of 7.
    assert choose(known({none: 1.0, two: 1.1, four: 1.2, all_: 2.0}, rows=8, drafts=7), 8, 7) == four
    assert choose(known({none: 1.0, two: 1.5, four: 4.5, all_: 9.0}, rows=8, drafts=7), 8, 7) == two
    assert choose(known({none: 1.0, two: 2.5, four: 4.5, all_: 9.0}, rows=8, drafts=7), 8, 7) == none


def test_what_never_ran_is_tried_unless_it_cannot_win():
    none, two, four, _ = widths(8, 7)
    slow = known({none: 1.0, two: 30.0}, rows=8, drafts=7)
    # Rounds of more tokens cannot be faster than those of fewer.
    assert choose(slow, 8, 7) == none
    assert choose(known({none: 1.0, two: 1.0}, rows=8, drafts=7), 8, 7) == four
    early = Costs(samples=slow.costs.samples)
    assert choose(dataclasses.replace(slow, costs=early), 8, 7) == none, "only after some rounds"


def test_what_did_not_run_for_long_is_run_once_again():
    options = none, two, four, all_ = widths(8, 7)
    experience = known({none: 1.0, two: 9.0, four: 9.0, all_: 9.0}, rows=8, drafts=7)
    chosen = []
    for _ in range(1000):
        width = choose(experience, 8, 7)
        chosen.append(width)
        kind = Round(8, width.tokens, width.drafts > 0, 0)
        experience = dataclasses.replace(
            experience, costs=experience.costs.with_round(kind, 1.0 if width == none else 9.0)
        )
    counts = Counter(chosen)
    assert all(3 <= counts[width] <= 6 for width in options[1:]), counts
    # Drafting pays again: within the next rounds it is seen.
    later = []
    for _ in range(600):
        width = choose(experience, 8, 7)
        later.append(width)
        kind = Round(8, width.tokens, width.drafts > 0, 0)
        experience = dataclasses.replace(experience, costs=experience.costs.with_round(kind, 1.0))
    assert later[-1] in (four, all_)


def test_a_new_number_of_rows_begins_with_what_was_good_for_others():
    experience = known({width: 1.0 for width in widths(8, 7)}, rows=8, drafts=7)
    costs = experience.costs.with_round(Round(8, 32, True, 0), 1.0)
    assert choose(dataclasses.replace(experience, costs=costs), 4, 7) == Width(7, 16)
    costs = costs.with_round(Round(8, 8, False, 0), 1.0)
    assert choose(dataclasses.replace(experience, costs=costs), 4, 7) == Width(0, 4)


def test_a_disturbed_measurement_does_not_count():
    costs, kind = Costs(), Round(1, 8, True, 0)
    for seconds in (1.0, 50.0, 1.1):
        assert costs.seconds(kind) is None
        costs = costs.with_round(kind, seconds)
    assert costs.seconds(kind) == 1.1


def test_rounds_of_other_context_lengths_stand_in_until_there_is_a_measurement():
    costs = Costs()
    for _ in range(3):
        costs = costs.with_round(Round(1, 8, True, 0), 1.0).with_round(Round(1, 8, True, 4), 3.0)
    assert costs.seconds(Round(1, 8, True, 1)) == 1.0 and costs.seconds(Round(1, 8, True, 5)) == 3.0
    assert [context_of(tokens) for tokens in (0, 512, 513, 1024, 1025, 2048, 8192)] == [0, 0, 1, 1, 2, 2, 4]


def test_costs_are_the_same_after_a_file():
    costs = Costs().with_round(Round(2, 4, True, 1), 0.5).with_round(Round(2, 2, False, 0), 0.25)
    assert costs_from_json(costs.as_json()).samples == costs.samples


def test_a_sure_draft_counts_as_likelier_before_and_after_calibration():
    fresh = uncalibrated(3).chance()
    assert (np.diff(fresh, axis=1) > 0).all() and fresh.min() == 0.5
    bins = np.array([[2, 2, 2]] * 400, np.int32)
    counted = uncalibrated(3).with_blocks(bins, np.full(400, 3), np.array([0, 3] * 200))
    chance = counted.chance()
    assert chance[0, 2] == pytest.approx(0.5, abs=0.03), "half of the first tokens were kept"
    assert chance[1, 2] > 0.95, "all that were reached"
    assert (chance[:, 3] == fresh[:, 3]).all()


def test_what_sampled_requests_say_is_distributed_as_without_a_budget():
    """Which drafted tokens are verified must not depend on what was drawn: 8,000 answers each way.

    The toy draws its first token evenly from those 4 to 7 after the anchor. Where the two ways' second tokens differ,
    neither way may prefer one of these.
    """
    prompt, seeds = (60, 25, 23), range(8000)
    sampling = {"temperature": 8.0, "max_tokens": 2, "ignore_eos": True}
    sizes = EngineConfig(max_slots=32, max_model_len=16, prefill_chunk=128, page_size=16)

    def distances(served: Engine) -> list[int]:
        ids = [served.add_request(prompt, {**sampling, "seed": seed}) for seed in seeds]
        done = {}
        while served.has_work:
            done.update({u.id: u.completion.token_ids for u in served.step() if u.completion})
        return [(done[request_id][1] - done[request_id][0]) % 64 for request_id in ids]

    plain = distances(Engine(models(None), sizes))
    cut = distances(with_budget(Engine(toy_models(), sizes, k=3), lambda plan: len(plan.decodes) * 3 // 2))
    differ = [(a, b) for a, b in zip(plain, cut, strict=True) if a != b]
    before, after = Counter(a for a, _ in differ), Counter(b for _, b in differ)
    apart = {each: (before[each] - after[each]) / (before[each] + after[each]) ** 0.5 for each in (4, 5, 6, 7)}
    assert len(differ) > 400 and max(map(abs, apart.values())) < 3.5, apart
