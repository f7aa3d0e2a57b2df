"""Counting acceptance in recorded rounds."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dflash_jax import Completion, ConfigError
from dflash_jax.acceptance import total_acceptance
from dflash_jax.analysis import (
    by_kind,
    by_position,
    compare,
    heat_map,
    linear_cost,
    measured_cost,
    over_time,
    rounds_of,
    token_kinds,
    what_if,
)
from dflash_jax.analysis.kinds import kind_of_text
from dflash_jax.engine.costs import Costs, Round
from dflash_jax.engine.output import Metrics
from tests.byte_tokenizer import byte_tokenizer
from tests.pairs import SAMPLING, alone, cases, engine, prompts
from tests.slow import mostly_slow

PAIR = "recall-dflash2"


def completion(tokens, produced, blocks, verified=None, name="r") -> Completion:
    """A record as an engine would leave it: `tokens` begins with the prefill's."""
    verified = [len(block) for block in blocks] if verified is None else verified
    drafted = [(p - 1, v) for p, v in zip(produced, verified, strict=True) if v]
    accepted, proposed = sum(a for a, _ in drafted), sum(v for _, v in drafted)
    metrics = Metrics(proposed, accepted, len(drafted), None, None, None, None, 0, 0)
    return Completion(
        name,
        4,
        tuple(tokens),
        None,
        "length",
        None,
        None,
        metrics,
        tuple(produced),
        tuple(map(tuple, blocks)),
        tuple(verified),
    )


def recorded(draft=PAIR, **options):
    served = engine(draft, **options)
    return served.generate(prompts(draft), SAMPLING)


def test_a_round_that_the_end_of_the_output_cut_counts_as_far_as_it_goes():
    # Two drafted tokens kept and the target's own; then two of three drafted ones, where the output ended.
    found = rounds_of([completion([9, 1, 2, 5, 7, 8], [3, 2], [[1, 2, 3], [7, 8, 6]])])
    assert found.kept.tolist() == [2, 2] and found.cut.tolist() == [False, True]
    assert found.observed.tolist() == [[True, True, True], [True, True, False]]
    positions = by_position(found)
    assert positions.reached.tolist() == [2, 2, 1] and positions.kept.tolist() == [2, 2, 0]
    assert positions.survival.tolist() == [1, 1, 0]


def test_the_last_token_of_an_output_may_be_the_target_s_own():
    found = rounds_of([completion([9, 1, 5], [2], [[1, 2, 3]])])
    assert found.kept.tolist() == [1] and found.cut.tolist() == [False]
    assert by_position(found).reached.tolist() == [1, 1, 0]


def test_what_was_not_verified_is_not_known():
    # The target kept both verified tokens, and its own is what the draft had as its third.
    found = rounds_of([completion([9, 1, 2, 3], [3], [[1, 2, 3]], verified=[2])])
    assert found.kept.tolist() == [2] and found.cut.tolist() == [False]
    assert by_position(found).reached.tolist() == [1, 1, 0]
    plain = rounds_of([completion([9, 1, 2], [1, 1], [[], []])])
    assert plain.k == 0 and not plain.observed.any() and len(by_position(plain).rate) == 0


@pytest.mark.parametrize("draft", mostly_slow("recall-dflash2", "recall-dflash1", "recall-dflash2-swa"))
@pytest.mark.parametrize("width", [None, 3])
def test_rounds_of_an_engine_have_kept_what_its_metrics_say(draft, width):
    completions = recorded(draft, width=width)
    found = rounds_of(completions)
    total = total_acceptance(one.metrics for one in completions)
    assert len(found) == total.drafted_request_steps and found.verified.sum() == total.drafts_proposed
    # The metrics take the last token of a cut round for the target's own.
    assert (found.kept - found.cut).sum() == total.drafts_accepted
    assert (found.cut <= (found.start + found.produced == 48)).all(), "only a last round is cut"
    assert (found.produced == found.kept + ~found.cut).all()
    for row in range(len(found)):
        text = completions[found.request[row]].token_ids
        produced = text[found.start[row] : found.start[row] + found.produced[row]]
        assert tuple(found.output[row][: found.produced[row]].tolist()) == produced


def test_acceptance_of_whole_rounds_is_the_reference_s():
    found = rounds_of([alone(PAIR, tuple(case["prompt"])) for case in cases(PAIR)])
    whole = found.where(~found.cut)
    expected = [p - 1 for case in cases(PAIR) for p in case["produced_per_round"]]
    assert found.kept[~found.cut].tolist() == [p for p, cut in zip(expected, found.cut, strict=True) if not cut]
    positions = by_position(whole)
    for position in range(whole.k):
        assert positions.survival[position] == pytest.approx(np.mean(whole.kept > position))
    assert positions.tokens_per_round == pytest.approx(1 + whole.kept.mean())


def test_job_outputs_count_as_completions_do(tmp_path):
    completions = recorded()
    lines = [
        {
            "id": at,
            "token_ids": list(one.token_ids),
            "prompt_tokens": one.prompt_tokens,
            "finish_reason": one.finish_reason,
            "metrics": dataclasses.asdict(one.metrics),
            "trace": {
                "produced_per_round": list(one.produced_per_round),
                "drafted_blocks": [list(block) for block in one.drafted_blocks],
                "verified_per_round": list(one.verified_per_round),
            },
        }
        for at, one in enumerate(completions)
    ]
    file = tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for found in (rounds_of(lines), rounds_of(file)):
        assert (found.kept == rounds_of(completions).kept).all() and found.ids == tuple(range(len(lines)))
    with pytest.raises(
        ConfigError, match=r"line 0 of the job's output has no trace; run the job with output.trace true"
    ):
        rounds_of([{**lines[0], "trace": None}])
    with pytest.raises(ConfigError, match="is not there; it must be the output of a job"):
        rounds_of(tmp_path / "none.jsonl")


def test_kinds_count_the_token_that_had_to_be_guessed_or_the_one_that_was_drafted():
    found = rounds_of([completion([9, 1, 2, 11], [3], [[1, 2, 3]])])
    kinds = by_kind(found, lambda token: "large" if token > 10 else "small")
    assert dict(zip(kinds.kinds, zip(kinds.reached, kinds.kept, strict=True), strict=True)) == {
        "small": (2, 2),
        "large": (1, 0),
    }
    drafted = by_kind(found, lambda token: "large" if token > 10 else "small", of="drafted")
    assert drafted.kinds == ("small",) and drafted.kept.tolist() == [2] and drafted.reached.tolist() == [3]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "word start"),
        ("ing", "continuation"),
        ("'s", "continuation"),
        (" 12", "digit"),
        ("7", "digit"),
        (", ", "punctuation"),
        (" (", "punctuation"),
        ("\n\n", "whitespace"),
        ("", "bytes"),
        ("�", "bytes"),
        (" été", "word start"),
        ("漢字", "continuation"),
    ],
)
def test_kinds_of_text(text, kind):
    assert kind_of_text(text) == kind


def test_kinds_of_a_tokenizer_s_tokens():
    tokenizer = byte_tokenizer()
    kind_of = token_kinds(tokenizer)
    of = {text: kind_of(tokenizer.encode(text)[0]) for text in ("a", "7", ".", " ", "é")}
    assert of == {"a": "continuation", "7": "digit", ".": "punctuation", " ": "whitespace", "é": "bytes"}


def test_heat_map_and_time_have_a_place_for_every_round():
    found = rounds_of(recorded())
    heat = heat_map(found)
    assert heat.shape == (len(found.ids), found.number.max() + 1)
    assert np.nansum(heat) == found.kept.sum() and np.isfinite(heat).sum() == len(found)
    time = over_time(found, window=8)
    assert time.rounds.sum() == (~found.cut).sum() and time.start.tolist() == [0, 8, 16, 24, 32, 40][: len(time.start)]
    assert np.nansum(time.kept * time.rounds) == pytest.approx(found.kept[~found.cut].sum())
    some = found.of([found.ids[1]])
    assert set(some.request.tolist()) == {1} and len(some.where(some.number < 2)) == 2


@pytest.mark.slow
def test_what_if_says_of_a_width_what_the_engine_does_at_that_width():
    found = what_if(rounds_of(recorded()), linear_cost(draft=0.2, token=0.02))
    assert found.k.tolist() == list(range(8)) and found.speed_up[0] == 1
    assert found.tokens_per_round[7] == pytest.approx(by_position(rounds_of(recorded())).tokens_per_round)
    for width in (2, 4):
        measured = by_position(rounds_of(recorded(width=width))).tokens_per_round
        assert found.tokens_per_round[width] == pytest.approx(measured, abs=0.25), width
    assert (found.low <= found.speed_up + 1e-9).all() and (found.speed_up <= found.high + 1e-9).all()
    assert found.best == found.k[np.argmax(found.speed_up)]


def test_what_if_follows_its_costs_and_marks_what_it_extrapolates():
    rounds = rounds_of([completion([9, 1, 2, 5], [3], [[1, 2, 3]], name=str(at)) for at in range(3)])
    cheap, dear = (what_if(rounds, linear_cost(draft=0, token=token), most=5) for token in (0.0, 2.0))
    assert (
        cheap.tokens_per_round.tolist() == [1, 2, 3, 3, 3, 3]
        and cheap.extrapolated.tolist() == [False] * 4 + [True] * 2
    )
    assert cheap.best == 2 and dear.best == 0
    table = what_if(rounds, {1: 2.0, 2: 3.0, 3: 30.0})
    assert table.speed_up.tolist() == [1, 1, 1, 0.1]
    with pytest.raises(ConfigError, match="no entry for k = 3"):
        what_if(rounds, {1: 2.0, 2: 3.0})
    with pytest.raises(ConfigError, match="no drafted token that was verified"):
        what_if(rounds_of([completion([9, 1], [1], [[]])]), linear_cost(draft=0, token=0))


def test_measured_costs_are_in_plain_rounds():
    costs = Costs()
    for kind, seconds in ((Round(1, 1, False, 0), 2.0), (Round(1, 2, True, 0), 3.0), (Round(1, 8, True, 0), 6.0)):
        for _ in range(3):
            costs = costs.with_round(kind, seconds)
    cost = measured_cost(costs)
    assert [cost(k) for k in (0, 1, 4, 7, 8)] == [1.0, 1.5, 2.25, 3.0, 3.25]
    with pytest.raises(ConfigError, match="no rounds of 2 rows without a draft were measured"):
        measured_cost(costs, rows=2)


def test_a_comparison_is_paired():
    rng = np.random.default_rng(0)
    hardness = rng.uniform(1, 9, 40)

    def run(extra):
        return [
            dataclasses.replace(
                completion([9], [], [], name=str(at)),
                metrics=Metrics(80, int(10 * (hard + extra)), 10, *[None] * 4, 0, 0),
            )
            for at, hard in enumerate(hardness)
        ]

    found = compare({"a": run(0), "b": run(0.3), "c": run(0)})
    assert found.difference[1] == pytest.approx(0.3, abs=0.05) and found.differ == (False, True, False)
    low, high = found.difference_interval[1]
    assert low > 0.2 and high < 0.4
    spread = found.length_interval[0]
    assert spread.high - spread.low > 1, "the lengths themselves depend far more on the prompts than on the drafter"
    assert found.difference_interval[0] == (0, 0) and found.per_prompt.shape == (3, 40)


def test_a_comparison_is_of_the_engine_s_own_figures_and_of_the_same_prompts():
    first, second = recorded(), recorded(k=3)
    found = compare({"7": first, "3": second})
    for label, run, length in zip(("7", "3"), (first, second), found.length, strict=True):
        assert length == pytest.approx(total_acceptance(one.metrics for one in run).mean_acceptance_length), label
    with pytest.raises(ConfigError, match="'b' has 1 requests and 'a' has 5"):
        compare({"a": first, "b": first[:1]})
    with pytest.raises(ConfigError, match=r"request 0 has a prompt of .* tokens in 'b'"):
        compare({"a": first, "b": first[::-1]})
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare({})
    lines = [
        {"id": str(at), "prompt_tokens": 1, "metrics": dataclasses.asdict(one.metrics)} for at, one in enumerate(first)
    ]
    by_id = compare({"a": lines, "b": lines[::-1]})
    assert (by_id.per_prompt[0] == by_id.per_prompt[1]).all(), "lines of jobs are matched by id"
    with pytest.raises(ConfigError, match="'b' has no request '4'"):
        compare({"a": lines, "b": [*lines[:4], {**lines[4], "id": "x"}]})
