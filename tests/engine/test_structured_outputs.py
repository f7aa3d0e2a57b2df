"""Structured output: the text fits its grammar, drafted and plain alike, and drafts follow the grammar."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from dflash_jax import Engine, RequestError, SamplingParams
from dflash_jax.checkpoints import load_draft
from dflash_jax.engine.grammars import choose_allowed
from dflash_jax.functional import check_state
from dflash_jax.sampling.masks import has_tokens, only_token, set_tokens
from tests.byte_tokenizer import byte_tokenizer
from tests.engine.test_processors import finish, with_text
from tests.pairs import GOLDEN, SAMPLING, assert_is_golden, cases, prompts
from tests.sampling.test_distribution import DRAWS, assert_follows
from tests.slow import mostly_slow

pytest.importorskip("llguidance")

PAIR = "recall-dflash2"
END = 63
"""A token that ends a text; in the byte tokenizer's alphabet the last one of the recall target's vocabulary."""

# The vocabulary of 64 bytes has digits, capitals, quotes and square brackets, and no space and no braces.
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 6,
    "items": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["RED", "GREEN", "BLUE"]}]},
    "x-guidance": {"item_separator": ",", "whitespace_flexible": False},
}
LONG: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": [END]}
AS_JSON = {**LONG, "structured_outputs": {"json": SCHEMA}}
REGEX = "[A-Z]{4,9}-[0-9]{2}"
HOT = {"temperature": 1.3}


def text_of(completion) -> str:
    tokens = completion.token_ids
    return byte_tokenizer().decode(tokens[:-1] if completion.finish_reason == "stop" else tokens)


def check_json(completion) -> None:
    assert completion.finish_reason == "stop", (completion.finish_reason, completion.error, text_of(completion))
    value = json.loads(text_of(completion))
    assert isinstance(value, list) and 3 <= len(value) <= 6
    assert all(item in ("RED", "GREEN", "BLUE") or 0 <= item <= 99 for item in value)


@pytest.mark.parametrize("pair", mostly_slow(PAIR, "recall-dflash1"))
@pytest.mark.parametrize("hot", [False, True], ids=["greedy", "sampled"])
def test_every_answer_is_valid_json(pair, hot):
    served = with_text(pair)
    many = [(prompts(pair) * 8)[index][: 3 + index % 9] for index in range(24)]
    for index, prompt in enumerate(many):
        extra = {**HOT, "seed": index} if hot else {}
        served.add_request(prompt, {**AS_JSON, **extra}, request_id=str(index))
    done = finish(served)
    assert len(done) == len(many)
    for completion in done.values():
        check_json(completion)
    assert sum(completion.metrics.drafts_accepted for completion in done.values()) > len(many)


@pytest.mark.parametrize("pair", mostly_slow(PAIR, "recall-dflash1"))
def test_greedy_drafted_tokens_are_those_of_plain_decoding(pair):
    for structured in ({"json": SCHEMA}, {"regex": REGEX}, {"choice": ["YES", "NO", "NOT YET", 'A"B']}):
        sampling = {**LONG, "structured_outputs": structured}
        drafted = with_text(pair).generate(prompts(pair)[:4], sampling)
        plain = with_text(pair).generate(prompts(pair)[:4], {**sampling, "speculation": False})
        assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
        assert all(completion.finish_reason == "stop" for completion in drafted)
        if "regex" in structured:
            assert all(re.fullmatch(REGEX, text_of(completion)) for completion in drafted)
        if "choice" in structured:
            assert {text_of(completion) for completion in drafted} <= {"YES", "NO", "NOT YET", 'A"B'}


def test_what_is_drafted_follows_the_grammar():
    """Of the drafted tokens that are verified none is forbidden as long as a candidate is allowed."""
    sampling = {**LONG, "structured_outputs": {"choice": ["ABCDEFGHIJKLMNOPQRS"]}}
    (completion,) = with_text().generate([prompts(PAIR)[0]], sampling)
    assert text_of(completion) == "ABCDEFGHIJKLMNOPQRS"
    # The grammar leaves one token at each position, so the whole block is accepted.
    assert completion.metrics.mean_acceptance_length > 5


def test_neighbours_without_a_grammar_are_untouched():
    served = with_text()
    served.add_request(prompts(PAIR)[2], AS_JSON, request_id="json")
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="plain")
    served.add_request(prompts(PAIR)[3], {**AS_JSON, "logit_bias": {16: 4.0}, "temperature": 1.0}, request_id="both")
    done = finish(served)
    assert_is_golden(done["plain"], cases(PAIR)[1])
    check_json(done["json"]), check_json(done["both"])
    alone = with_text().generate([prompts(PAIR)[2]], AS_JSON)[0]
    assert done["json"].token_ids == alone.token_ids and done["json"].drafted_blocks == alone.drafted_blocks


def test_several_rounds_a_step_and_preemption_change_nothing():
    alone = [with_text().generate([prompt], AS_JSON)[0].token_ids for prompt in prompts(PAIR)[1:4]]
    served = with_text(rounds_per_step=3)
    assert [c.token_ids for c in served.generate(prompts(PAIR)[1:4], AS_JSON)] == alone
    long = {"max_tokens": 34, "stop_token_ids": [END], "structured_outputs": {"regex": "[A-Z0-9]{30}"}}
    alone = [with_text().generate([prompt], long)[0].token_ids for prompt in prompts(PAIR)[1:4]]
    small = with_text(pages=6)
    assert [c.token_ids for c in small.generate(prompts(PAIR)[1:4], long)] == alone
    assert small.host.counters.preemptions > 0


def test_snapshots_and_forks_go_on_with_the_same_tokens(tmp_path):
    served = with_text()
    for index in range(3):
        served.add_request(prompts(PAIR)[index], AS_JSON, request_id=str(index))
    served.step(), served.step()
    check_state(served.models, served.host, served.state)
    served.snapshot(tmp_path / "snapshot")
    twins = [
        Engine.restore(tmp_path / "snapshot", with_text()),
        served.fork(),
        served.fork(draft=load_draft(GOLDEN / "recall-dflash1")),
    ]
    done = {name: completion.token_ids for name, completion in finish(served).items()}
    for twin in twins:
        assert {name: completion.token_ids for name, completion in finish(twin).items()} == done


def test_tokens_follow_the_masked_distribution_drafted_and_plain():
    """The first two characters of many requests, of a target that is not sure of them."""
    counts = {}
    sampling = {"max_tokens": 2, "stop_token_ids": [END], "temperature": 3.0}
    sampling["structured_outputs"] = {"regex": "[ABC][123]Z"}
    draws = max(400, DRAWS // 50)
    for speculation in (True, False):
        served = with_text()
        ids = [
            served.add_request(
                prompts(PAIR)[0], {**sampling, "seed": seed + 9999 * speculation, "speculation": speculation}
            )
            for seed in range(draws)
        ]
        done = finish(served)
        texts = [byte_tokenizer().decode(done[request_id].token_ids) for request_id in ids]
        names = [a + b for a in "ABC" for b in "123"]
        assert set(texts) <= set(names)
        counts[speculation] = np.array([texts.count(name) for name in names])
    kept = (counts[True] + counts[False]) >= 20
    from scipy import stats

    table = np.stack([counts[True][kept], counts[False][kept]])
    assert kept.sum() >= 3, counts
    assert stats.chi2_contingency(table).pvalue > 1e-4, counts


def test_a_draw_from_q_follows_the_changed_q():
    rng, mask = np.random.default_rng(3), np.zeros(1, np.uint32)
    set_tokens(mask, [2, 5, 9], True)
    candidates, q = np.array([7, 5, 1, 9]), np.array([0.4, 0.2, 0.1, 0.3], np.float32)
    changed, drawn = q.copy(), []
    for token in rng.choice(candidates, DRAWS, p=q / q.sum()):
        changed = q.copy()
        drawn.append(int(choose_allowed(mask, token, candidates.copy(), changed)))
    assert changed.sum() == pytest.approx(1) and (changed[[0, 2]] == 0).all()
    assert_follows(np.array([drawn.count(token) for token in candidates]), changed)


def test_a_forced_token_is_drafted_though_it_is_no_candidate():
    mask = np.zeros(2, np.uint32)
    set_tokens(mask, [40], True)
    candidates, q = np.array([7, 5]), np.array([0.4, 0.6], np.float32)
    assert choose_allowed(mask, candidates[1], candidates, q) == 40 == only_token(mask)
    assert candidates.tolist() == [40, 5] and q.tolist() == [1, 0]
    set_tokens(mask, [3], True)
    assert only_token(mask) is None and has_tokens(mask, np.array([3, 4, 40])).tolist() == [True, False, True]


REFUSED = [
    ({"json": {"type": "nonsense"}}, 'json \'{"type": "nonsense"}\', which cannot be used: Invalid type'),
    ({"json": "{x"}, "which is no JSON"),
    ({"json": 3}, "the schema an object"),
    ({"regex": "(a"}, "regex '(a', which cannot be used"),
    ({"regex": ""}, "it must be one of"),
    ({"choice": []}, "none of them empty"),
    ({"choice": [3]}, "none of them empty"),
    ({"json": {}, "regex": "a"}, "it must be one of"),
    ({"yaml": {}}, "it must be one of"),
    ("json", "it must be one of"),
    ({"json": {"$ref": "http://example.com/x"}}, "cannot be used"),
]


@pytest.mark.parametrize(("structured", "why"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_a_grammar_that_cannot_be_followed_is_refused_in_one_sentence(structured, why):
    with pytest.raises(RequestError) as refused:
        with_text().add_request(prompts(PAIR)[0], {**LONG, "structured_outputs": structured})
    message = str(refused.value)
    assert message.startswith("sampling.structured_outputs ") and why in message
    assert "\n" not in message and len(message) < 500


def test_a_request_that_nothing_would_end_is_refused():
    served = with_text()
    if not served.models.target_config.eos_token_ids:
        with pytest.raises(RequestError, match="needs a token to end with"):
            served.add_request(prompts(PAIR)[0], {"structured_outputs": {"regex": "A"}})
    with pytest.raises(RequestError, match="needs a token to end with"):
        served.add_request(prompts(PAIR)[0], {"structured_outputs": {"regex": "A"}, "ignore_eos": True})


def test_parameters_can_be_copied_and_compared():
    params = SamplingParams(structured_outputs={"choice": ["A", "B"]})
    assert dataclasses.replace(params, top_k=2).structured_outputs == params.structured_outputs
    assert params == SamplingParams(structured_outputs=params.structured_outputs)
    hash(params)
