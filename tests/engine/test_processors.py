"""Requests whose parameters change the target's logits: the same tokens drafted and plain, whoever else is served."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import Engine, InvariantError, RequestError, SamplingParams
from dflash_jax.checkpoints import load_draft
from dflash_jax.engine.parameters import MAX_BAD_WORDS, MAX_LOGIT_BIAS, PROCESSED
from dflash_jax.engine.processors import PROCESSORS
from dflash_jax.engine.run import _decode_program, _prefill_program
from dflash_jax.engine.warmup import possible_plans
from dflash_jax.functional import check_state
from dflash_jax.models.lm_head import make_shortlist
from tests.byte_tokenizer import byte_tokenizer
from tests.pairs import GOLDEN, SAMPLING, alone, assert_is_golden, cases, engine, models, prompts, record, step_in_order
from tests.slow import mostly_slow

PAIR = "recall-dflash2"
LONG = {"max_tokens": 24, "ignore_eos": True}

# Tokens among which the target is not as sure as it is of its answers, so that a penalty decides.
SOME = {"allowed_token_ids": [*range(10, 40)]}
FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.9, **SOME},
    "presence": {"presence_penalty": 2.0, **SOME},
    "frequency": {"frequency_penalty": 1.0, **SOME},
    "bias": {"logit_bias": {5: 9.0, 6: 8.0, 12: -100}},
    "allowed": SOME,
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [17, 48, 36, 12, 54]},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.6,
        "logit_bias": {5: 3.0},
        "allowed_token_ids": [*range(3, 60)],
        "min_tokens": 5,
        "stop_token_ids": [17, 48, 36],
    },
}
HOT = {"temperature": 1.5, "seed": 11}


def with_text(pair: str | None = PAIR, **sizes: Any) -> Engine:
    like = engine(pair, **sizes)
    served = Engine(models(pair), like.config, tokenizer=byte_tokenizer())
    served.host = dataclasses.replace(served.host, pool=like.host.pool)
    return served


def finish(served: Engine) -> dict[str, Any]:
    done = {}
    while served.has_work:
        for update in served.step():
            done.update({update.id: update.completion} if update.completion else {})
    return done


def lonely(prompt, sampling: dict[str, Any]):
    """A request on its own in a fresh engine."""
    return engine(PAIR, prefix_cache=False).generate([prompt], {**LONG, **sampling})[0]


@pytest.mark.parametrize("hot", mostly_slow(False, True), ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("pair", mostly_slow(PAIR, "recall-dflash1"))
def test_greedy_drafted_tokens_are_the_plain_ones_and_the_parameters_matter(pair, name, hot):
    sampling = {**LONG, **FEATURES[name], **(HOT if hot else {})}
    drafted = engine(pair).generate(prompts(pair)[:4], sampling)
    assert sum(completion.metrics.drafts_accepted for completion in drafted) > 4
    if not hot:
        plain = engine(pair).generate(prompts(pair)[:4], {**sampling, "speculation": False})
        assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    less = SOME if "penalty" in str(sampling) else {}
    without = engine(pair).generate(prompts(pair)[:4], {**LONG, **less, **(HOT if hot else {})})
    assert [completion.token_ids for completion in drafted] != [completion.token_ids for completion in without]


@pytest.mark.parametrize("hot", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pair", mostly_slow(PAIR, "recall-dflash1"))
def test_what_is_forbidden_is_neither_said_nor_drafted(pair, hot):
    allowed = [3, 17, 48]
    sampling = {**LONG, "allowed_token_ids": allowed, **(HOT if hot else {})}
    for completion in engine(pair).generate(prompts(pair)[:3], sampling):
        assert set(completion.token_ids) <= set(allowed)
        assert {token for block in completion.drafted_blocks for token in block} <= set(allowed)
        assert completion.metrics.mean_acceptance_length > 1.2


@pytest.mark.parametrize("pair", mostly_slow(PAIR, "recall-dflash1"))
def test_a_shortlist_drafts_what_is_allowed_of_it(pair):
    of = models(pair)
    listed, allowed = [*range(0, 64, 3)], [3, 4, 17, 48]
    served = Engine(of.replace(shortlist=make_shortlist(of.target, listed)), engine(pair).config)
    sampling = {**LONG, "allowed_token_ids": allowed}
    drafted = served.generate(prompts(pair)[:2], sampling)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in engine(pair).generate(prompts(pair)[:2], sampling)]
    for completion in drafted:
        assert {token for block in completion.drafted_blocks for token in block} <= {3, 48}


@pytest.mark.parametrize("hot", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", [True, False])
def test_no_token_ends_the_output_before_min_tokens(speculation, hot):
    sampling = {**LONG, **FEATURES["min_tokens"], "speculation": speculation, **(HOT if hot else {})}
    ends = []
    for completion in engine(PAIR).generate(prompts(PAIR), sampling):
        assert not set(completion.token_ids[:9]) & {17, 48, 36, 12, 54}
        assert len(completion.token_ids) > 9
        ends.append(completion.finish_reason)
    assert "stop" in ends


@pytest.mark.parametrize("hot", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_words_are_not_said_and_the_rest_is_as_plain(length, hot):
    extra = HOT if hot else {}
    said = [with_text().generate([prompt], {**LONG, **extra})[0].token_ids for prompt in prompts(PAIR)[:3]]
    words = [byte_tokenizer().decode(tokens[at : at + length]) for tokens in said for at in (1, 6)]
    sampling = {**LONG, "bad_words": words, **extra}
    drafted = with_text().generate(prompts(PAIR)[:3], sampling)
    for completion, before in zip(drafted, said, strict=True):
        text = byte_tokenizer().decode(completion.token_ids)
        assert not any(word in text for word in words)
        assert completion.token_ids != before
        assert completion.metrics.drafts_accepted > 0
    if not hot:
        plain = with_text().generate(prompts(PAIR)[:3], {**sampling, "speculation": False})
        assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


@pytest.mark.parametrize("rounds", [1, 3])
def test_requests_with_and_without_processors_do_not_touch_each_other(rounds):
    """In any rows, in slots that others had before, in several rounds a step."""
    names = [*FEATURES]
    served = engine(PAIR, rounds_per_step=rounds, slots=3)
    queue = []
    for index in range(9):
        hot = {"temperature": 1.2, "seed": index} if index % 4 == 1 else {}
        feature = FEATURES[names[index % len(names)]] if index % 3 != 2 else {}
        queue.append((prompts(PAIR)[index % 5], {**LONG, "max_tokens": 8 + 3 * (index % 4), **feature, **hot}))
    for index, (prompt, sampling) in enumerate(queue):
        served.add_request(prompt, sampling, request_id=str(index))
    done = {}
    while served.has_work:
        step_in_order(served, lambda count: range(count - 1, -1, -1))
        check_state(served.models, served.host, served.state)
        done.update({update.id: update.completion for update in served.host.undelivered if update.completion})
        served.host = dataclasses.replace(served.host, undelivered=type(served.host.undelivered)())
    for index, (prompt, sampling) in enumerate(queue):
        assert record(done[str(index)]) == record(lonely(prompt, sampling)), (index, sampling)


def test_a_slots_next_owner_has_nothing_of_its_processors():
    """The second owner asks for nothing, while a neighbour goes on with processors."""
    served = engine(PAIR, slots=2)
    served.add_request(prompts(PAIR)[1], {**LONG, "max_tokens": 40, **FEATURES["repetition"]}, request_id="neighbour")
    served.add_request(prompts(PAIR)[2], {**LONG, "max_tokens": 2, **FEATURES["allowed"]}, request_id="first")
    served.add_request(prompts(PAIR)[3], SAMPLING, request_id="second")
    assert_is_golden(finish(served)["second"], cases(PAIR)[3])


def test_requests_resume_after_preemption_with_the_same_tokens():
    served = engine(PAIR, pages=6)
    for index, name in enumerate(("repetition", "frequency", "all")):
        served.add_request(prompts(PAIR)[index + 1], {**LONG, **FEATURES[name], **HOT}, request_id=name)
    done = finish(served)
    assert served.host.counters.preemptions > 0
    for index, name in enumerate(("repetition", "frequency", "all")):
        assert done[name].token_ids == lonely(prompts(PAIR)[index + 1], {**FEATURES[name], **HOT}).token_ids


def test_a_prefix_hit_counts_the_tokens_it_did_not_run():
    prompt = (prompts(PAIR)[2] * 3)[:40]
    sampling = {**LONG, **FEATURES["repetition"]}
    served = engine(PAIR)
    first, second = (served.generate([prompt], sampling)[0] for _ in range(2))
    assert second.metrics.cached_tokens > 0
    assert record(first) == record(second) == record(lonely(prompt, FEATURES["repetition"]))


def test_snapshots_and_forks_go_on_with_the_same_tokens(tmp_path):
    served = engine(PAIR)
    for index, name in enumerate(("frequency", "min_tokens", "all")):
        served.add_request(prompts(PAIR)[index], {**LONG, **FEATURES[name]}, request_id=name)
    for _ in range(4):
        served.step()
    check_state(served.models, served.host, served.state)
    served.snapshot(tmp_path / "snapshot")
    fork, other = served.fork(), served.fork(draft=load_draft(GOLDEN / "recall-dflash1"))
    done = {name: completion.token_ids for name, completion in finish(served).items()}
    for twin in (Engine.restore(tmp_path / "snapshot", engine(PAIR)), fork, other):
        assert {name: completion.token_ids for name, completion in finish(twin).items()} == done
    for index, name in enumerate(("frequency", "min_tokens", "all")):
        assert done.get(name) in (None, lonely(prompts(PAIR)[index], FEATURES[name]).token_ids)


def test_an_engine_without_such_requests_has_neither_their_memory_nor_their_programs():
    # Sizes that no other test has, so that nothing is compiled for them yet.
    served = engine(PAIR, donate=True, max_slots=2, max_model_len=144)
    served.generate(prompts(PAIR)[:2], LONG)
    assert served.state.processors is None
    programs = _decode_program(True), _prefill_program(True)
    before = [set(program._compiled) for program in programs]
    served.generate(prompts(PAIR)[:2], {**LONG, **FEATURES["all"]})
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(served.state.processors))
    assert 0 < held == served.config.max_slots * _bytes_of_a_slot(served)
    after = [set(program._compiled) for program in programs]
    assert all(more > less for more, less in zip(after, before, strict=True))
    # Now the memory is there, and whoever needs none of it still runs what ran before.
    served.generate(prompts(PAIR)[:2], LONG)
    assert [set(program._compiled) for program in programs] == after
    assert record(served.generate([prompts(PAIR)[1]], LONG)[0]) == record(
        alone(PAIR, tuple(prompts(PAIR)[1]), tuple(LONG.items()))
    )


def _bytes_of_a_slot(served: Engine) -> int:
    from dflash_jax.engine.memory import sizes_of

    return sizes_of(served.config, served.models.target_config).processors


def test_warming_up_for_processors_prepares_the_programs_that_requests_with_them_use():
    served = engine(PAIR, donate=True, max_slots=2, max_model_len=144)
    plain, both = (possible_plans(served.host, requests=1, processed=processed) for processed in (False, True))
    assert both[: len(plain)] == plain and len(both) == 2 * len(plain)
    served.warmup(requests=1, processed=True)
    programs = _decode_program(True), _prefill_program(True)
    before = [set(program._compiled) for program in programs]
    served.generate(prompts(PAIR)[:1], {**LONG, **FEATURES["all"]})
    assert [set(program._compiled) for program in programs] == before


def test_every_parameter_that_needs_a_processor_is_known_as_one():
    assert sorted(PROCESSED) == sorted(name for processor in PROCESSORS for name in processor.parameters)
    assert not SamplingParams().is_processed
    for values in FEATURES.values():
        assert SamplingParams().override(values).is_processed


@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": [17, 48], "stop_token_ids": [17, 48], "min_tokens": 2},
        {"allowed_token_ids": [0], "bad_words": ["!"]},
    ],
)
def test_a_request_that_forbids_every_token_is_refused(sampling):
    with pytest.raises(RequestError, match="forbid every token"):
        with_text().add_request(prompts(PAIR)[1], sampling)


@pytest.mark.parametrize("speculation", [True, False])
def test_a_request_that_comes_to_forbid_every_token_ends_with_an_error_of_its_own(speculation):
    served = with_text()
    text = byte_tokenizer().decode([5, 5, 5])
    bad = {**LONG, "allowed_token_ids": [5], "bad_words": [text], "speculation": speculation}
    completions = served.generate([prompts(PAIR)[0], prompts(PAIR)[1]], bad)
    for completion in completions:
        assert completion.finish_reason == "error" and completion.token_ids == (5, 5)
        assert completion.error.startswith("token_allowed is violated") and "after 2 tokens" in completion.error
    served.add_request(prompts(PAIR)[0], bad, request_id="bad")
    served.add_request(prompts(PAIR)[1], SAMPLING, request_id="good")
    assert_is_golden(finish(served)["good"], cases(PAIR)[1])
    assert served.host.pool.available == served.config.pool_pages


@pytest.mark.parametrize("stop", [False, True], ids=["", "stop string"])
def test_stop_strings_before_min_tokens_are_text(stop):
    plain = with_text().generate([prompts(PAIR)[2]], LONG)[0].token_ids
    word = byte_tokenizer().decode(plain[3:5])
    at = next(i for i in range(4, len(plain)) if plain[i - 1 : i + 1] == plain[3:5]) + 1
    sampling = {**LONG, "stop": [word]}
    assert len(with_text().generate([prompts(PAIR)[2]], sampling)[0].token_ids) == at
    later = with_text().generate([prompts(PAIR)[2]], {**sampling, "min_tokens": at})[0]
    again = [i + 1 for i in range(at, len(plain)) if plain[i - 1 : i + 1] == plain[3:5]]
    assert len(later.token_ids) == (again[0] if again else len(plain))
    assert word in later.text
    # One token less is too early only for those before it.
    assert len(with_text().generate([prompts(PAIR)[2]], {**sampling, "min_tokens": at - 1})[0].token_ids) == at


def test_a_history_that_is_not_the_requests_is_noticed():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[1], {**LONG, **FEATURES["repetition"]})
    served.step(), served.step()
    check_state(served.models, served.host, served.state)
    processors = served.state.processors
    damaged = served.state.replace(processors=processors.replace(history=processors.history.at[:, 4].add(1)))
    with pytest.raises(InvariantError, match="processor_history: "):
        check_state(served.models, served.host, damaged)


def test_numpy_values_and_json_keys_are_taken():
    params = SamplingParams(logit_bias={np.int64(3): np.float32(2), "5": 1}, allowed_token_ids=np.arange(3, 6))
    assert params.logit_bias == ((3, 2.0), (5, 1.0)) and params.allowed_token_ids == (3, 4, 5)
    assert dataclasses.replace(params, top_k=3).logit_bias == params.logit_bias
    assert SamplingParams(bad_words="no").bad_words == ("no",)
    hash(params)


REFUSED = [
    ("repetition_penalty", 0, "above 0"),
    ("repetition_penalty", float("nan"), "above 0"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", "much", "from -2 to 2"),
    ("frequency_penalty", True, "from -2 to 2"),
    ("logit_bias", {5: 101}, "5: 101; it must be a mapping"),
    ("logit_bias", {"five": 1}, "'five': 1; it must be a mapping"),
    ("logit_bias", {-1: 1}, "-1: 1; it must be a mapping"),
    ("logit_bias", {1: float("nan")}, "1: nan; it must be a mapping"),
    ("logit_bias", 7, "is 7; it must be a mapping"),
    ("logit_bias", {1: 1, "1": 2}, "token 1 twice"),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1), f"at most {MAX_LOGIT_BIAS}"),
    ("allowed_token_ids", [], "at least one token id"),
    ("allowed_token_ids", ["a"], "at least one token id"),
    ("allowed_token_ids", 3, "at least one token id"),
    ("bad_words", [" "], "none of them blank"),
    ("bad_words", [3], "none of them blank"),
    ("bad_words", ["x"] * (MAX_BAD_WORDS + 1), f"at most {MAX_BAD_WORDS}"),
    ("min_tokens", -1, "0 or a positive integer"),
    ("min_tokens", 65, "more than sampling.max_tokens 64"),
]


@pytest.mark.parametrize(("name", "value", "why"), REFUSED, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(REFUSED)])
def test_values_outside_their_range_are_refused_by_name(name, value, why):
    with pytest.raises(RequestError) as refused:
        SamplingParams().override({name: value})
    assert str(refused.value).startswith(f"sampling.{name} ") and why in str(refused.value)
    assert len(str(refused.value)) < 300


def test_tokens_outside_the_vocabulary_and_words_without_a_tokenizer_are_refused():
    served = engine(PAIR)
    for sampling in ({"logit_bias": {64: 1}}, {"allowed_token_ids": [3, 64]}):
        with pytest.raises(RequestError, match=r"has token 64, which is outside the vocabulary of 64 tokens"):
            served.add_request(prompts(PAIR)[0], sampling)
    with pytest.raises(RequestError, match=r"bad_words needs a tokenizer"):
        served.add_request(prompts(PAIR)[0], {"bad_words": ["x"]})
    with pytest.raises(RequestError, match=r"is 40 tokens; at most 16 can be"):
        with_text().add_request(prompts(PAIR)[0], {"bad_words": ["x" * 40]})
