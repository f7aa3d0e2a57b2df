"""Log-probabilities: the target's own, one for each token, whatever drafted it and whatever happened meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax import Completion, Engine, EngineConfig, InvariantError, RequestError, SamplingParams
from dflash_jax.checkpoints import load_target
from dflash_jax.engine import Models
from dflash_jax.engine.containers import Log
from dflash_jax.engine.host import preempt
from dflash_jax.engine.logprob_records import MAX_LOGPROBS, TokenLogprob
from dflash_jax.functional import check_state
from tests.byte_tokenizer import byte_tokenizer
from tests.engine.test_snapshots import finish
from tests.full_forward import full_logprobs, log_softmax
from tests.pairs import GOLDEN, HYBRID, SERVED, alone, engine, models, prompts, tensors
from tests.slow import mostly_slow

PAIR = "recall-dflash2"
TOLERANCE = 1e-4
ASKED: dict[str, Any] = {"logprobs": 5, "prompt_logprobs": 5}
GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, **ASKED}
HOT: dict[str, Any] = {**GREEDY, "temperature": 3.0, "top_p": 0.95, "seed": 5}


def assert_are(records: tuple[TokenLogprob | None, ...], tokens: list[int], truth: np.ndarray, top: int = 5) -> None:
    """The records are of these tokens, and `truth`, [tokens, vocab], has their log-probabilities."""
    assert len(records) == len(tokens) == len(truth)
    for record, token, row in zip(records, tokens, truth, strict=True):
        assert record is not None and record.token_id == token
        assert abs(record.logprob - row[token]) < TOLERANCE
        # Within the tolerance others may be equally likely.
        assert (row > row[token] + TOLERANCE).sum() < record.rank <= (row > row[token] - TOLERANCE).sum()
        best = np.sort(row)[::-1][:top]
        np.testing.assert_allclose([one.logprob for one in record.top], best, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose([row[one.token_id] for one in record.top], best, atol=TOLERANCE, rtol=0)
        assert record.rank > top or record.top[record.rank - 1].token_id == token


def assert_is_whole(completion: Completion, prompt: list[int], truth: np.ndarray) -> None:
    """A completion's log-probabilities are those of `truth`, [prompt and output, vocab]."""
    assert completion.logprobs is not None and completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    length = len(prompt)
    assert_are(completion.prompt_logprobs[1:], list(prompt[1:]), truth[: length - 1])
    output = list(completion.token_ids)
    assert_are(completion.logprobs, output, truth[length - 1 : length - 1 + len(output)])


def known(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.logprobs, completion.prompt_logprobs


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pair", mostly_slow(PAIR, "recall-dflash1", "recall-dflash2-swa"))
def test_logprobs_are_those_of_a_full_float64_forward(pair, sampling):
    for completion, prompt in zip(engine(pair).generate(prompts(pair), sampling), prompts(pair), strict=True):
        truth = full_logprobs(GOLDEN / "recall-target", [*prompt, *completion.token_ids])
        assert_is_whole(completion, prompt, truth)
        assert completion.metrics.drafts_accepted > 0 or sampling is HOT


@pytest.mark.parametrize("pair", mostly_slow(PAIR, "recall-dflash1", "recall-dflash2-swa", HYBRID))
def test_prompt_logprobs_are_those_of_transformers_logits(pair):
    sampling = {**ASKED, "max_tokens": 1}
    for index, completion in enumerate(engine(pair).generate(prompts(pair), sampling)):
        logits = tensors(pair)[f"{index}.prompt_logits"]
        assert_is_whole(completion, prompts(pair)[index], log_softmax(logits.reshape(-1, logits.shape[-1])))


@pytest.mark.parametrize("family", ["tiny-llama-rope3-tied", "tiny-qwen3-moe", "tiny-qwen3_5"])
def test_prompt_logprobs_of_other_families_are_those_of_transformers_logits(family):
    target, record = load_target(GOLDEN / family), load_file(GOLDEN / f"{family}.safetensors")
    served = Engine(Models(target.params, target.config), EngineConfig(max_slots=2, max_model_len=128))
    for index in range(sum(name.endswith(".ids") for name in record)):
        ids, logits = record[f"{index}.ids"].reshape(-1), record[f"{index}.logits"]
        ids, logits = ids[:120], logits.reshape(-1, logits.shape[-1])[:120]
        [completion] = served.generate([ids.tolist()], {**ASKED, "max_tokens": 1, "ignore_eos": True})
        assert_is_whole(completion, ids.tolist(), log_softmax(logits))


@pytest.mark.parametrize("pair", SERVED)
def test_output_logprobs_are_the_prompt_logprobs_of_the_same_tokens(pair):
    served = engine(pair)
    sampling = {**HOT, "max_tokens": 30}
    for completion, prompt in zip(served.generate(prompts(pair)[:3], sampling), prompts(pair), strict=False):
        whole = [*prompt, *completion.token_ids]
        [again] = served.generate([whole], {**ASKED, "max_tokens": 1})
        vocab = np.array([record.logprob for record in again.prompt_logprobs[1:]])
        mine = [record.logprob for record in (*completion.prompt_logprobs[1:], *completion.logprobs)]
        np.testing.assert_allclose(mine, vocab, atol=TOLERANCE, rtol=0)
        assert len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("pair", [PAIR, HYBRID])
def test_greedy_logprobs_are_the_same_bits_drafted_and_plain(pair, native_code):
    served = engine(pair, prefix_cache=False)
    for prompt in prompts(pair)[:3]:
        [drafted] = served.generate([prompt], GREEDY)
        [plain] = served.generate([prompt], {**GREEDY, "speculation": False})
        assert drafted.metrics.drafts_accepted > 0
        assert known(drafted) == known(plain)


@pytest.mark.parametrize("sizes", [{"width": 3}, {"rounds_per_step": 4}], ids=str)
def test_logprobs_do_not_depend_on_how_much_is_verified_or_how_many_rounds_a_step_runs(sizes):
    served = engine(PAIR, **sizes)
    for completion, prompt in zip(served.generate(prompts(PAIR), HOT), prompts(PAIR), strict=True):
        truth = full_logprobs(GOLDEN / "recall-target", [*prompt, *completion.token_ids])
        assert_is_whole(completion, prompt, truth)


def test_logprobs_of_packed_blocks_are_found_where_they_were_put(monkeypatch):
    """Few enough tokens in all that the rows' blocks are cut to different lengths."""
    from dflash_jax.engine import plan
    from dflash_jax.engine.width import Width

    monkeypatch.setattr(plan, "choose_width", lambda *_, rows, drafts, **__: Width(drafts, 4 * rows))
    packed = engine(PAIR, width="auto").generate(prompts(PAIR)[:4], GREEDY)
    assert any(0 < verified < 7 for completion in packed for verified in completion.verified_per_round)
    for prompt, completion in zip(prompts(PAIR), packed, strict=False):
        assert_is_whole(completion, prompt, full_logprobs(GOLDEN / "recall-target", [*prompt, *completion.token_ids]))


def test_each_request_in_company_has_the_logprobs_it_asks_for():
    hot = {"logprobs": MAX_LOGPROBS, "temperature": 1.0}
    wanted = [{"logprobs": 3}, {}, hot, {"logprobs": 0, "speculation": False}]
    plain = {"max_tokens": 24, "ignore_eos": True}
    served = engine(PAIR)
    for name, (prompt, own) in enumerate(zip(prompts(PAIR), wanted, strict=False)):
        served.add_request(prompt, {**plain, **own}, request_id=str(name))
    done = finish(served)
    for name, (prompt, own) in enumerate(zip(prompts(PAIR), wanted, strict=False)):
        mine = done[str(name)]
        assert mine.token_ids == alone(PAIR, tuple(prompt), tuple({**plain, **own, "logprobs": None}.items())).token_ids
        assert mine.prompt_logprobs is None
        if "logprobs" not in own:
            assert mine.logprobs is None
            continue
        truth = full_logprobs(GOLDEN / "recall-target", [*prompt, *mine.token_ids])[len(prompt) - 1 : -1]
        assert_are(mine.logprobs, list(mine.token_ids), truth, top=own["logprobs"])


def test_nothing_is_computed_for_requests_that_do_not_ask(monkeypatch):
    def refused(*_):
        raise AssertionError("log-probabilities were computed though nobody asked")

    # Of sizes that no other test has, so that the programs are made here.
    monkeypatch.setattr("dflash_jax.engine.logprobs.logprobs_of", refused)
    served = engine(PAIR, max_slots=3, max_model_len=96)
    [completion] = served.generate(prompts(PAIR)[:1], {"max_tokens": 4})
    assert completion.logprobs is None and completion.prompt_logprobs is None
    with pytest.raises(AssertionError, match="though nobody asked"):
        served.generate(prompts(PAIR)[:1], {"max_tokens": 4, "logprobs": 1})


def test_few_programs_are_made_whatever_numbers_are_asked_for():
    from dflash_jax.engine.logprob_records import size_for

    assert size_for([None, None]) is None and size_for([]) is None
    sizes = {size_for([None, count]) for count in range(MAX_LOGPROBS + 1)}
    assert sizes == {0, 1, 5, 20}
    assert all(size_for([count, 0]) >= count for count in range(MAX_LOGPROBS + 1))


def test_a_prompt_with_logprobs_is_run_whole_and_then_serves_others():
    served, prompt = engine(PAIR), prompts(PAIR)[3]
    first = served.generate([prompt], {"max_tokens": 4, "logprobs": 2})[0]
    second = served.generate([prompt], {"max_tokens": 4, **ASKED})[0]
    third = served.generate([prompt], {"max_tokens": 4, "logprobs": 2})[0]
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 0)
    assert third.metrics.cached_tokens >= 16
    np.testing.assert_allclose(
        [record.logprob for record in first.logprobs], [record.logprob for record in third.logprobs], atol=TOLERANCE
    )
    assert_is_whole(second, prompt, full_logprobs(GOLDEN / "recall-target", [*prompt, *second.token_ids]))


def test_chunks_of_a_prompt_join_without_a_gap():
    served = engine(PAIR, prefill_chunk=16)
    for prompt, completion in zip(prompts(PAIR), served.generate(prompts(PAIR), GREEDY), strict=True):
        assert_is_whole(completion, prompt, full_logprobs(GOLDEN / "recall-target", [*prompt, *completion.token_ids]))


def test_preempted_requests_lose_and_double_nothing():
    served = engine(PAIR, pages=6)
    completions = served.generate(prompts(PAIR)[1:4], HOT)
    assert served.host.counters.preemptions > 0
    for completion, prompt in zip(completions, prompts(PAIR)[1:4], strict=True):
        assert completion.token_ids == alone(PAIR, tuple(prompt), tuple(HOT.items())).token_ids
        assert_is_whole(completion, prompt, full_logprobs(GOLDEN / "recall-target", [*prompt, *completion.token_ids]))


@pytest.mark.parametrize("pair", [PAIR, HYBRID])
@pytest.mark.parametrize("chunks", mostly_slow(2, 1))
def test_a_request_preempted_within_its_prompt_goes_on_from_what_it_knows(pair, chunks):
    # Chunks end within pages, so that some tokens are run again whose log-probabilities are known.
    served, prompt = engine(pair, prefill_chunk=24), max(prompts(pair), key=len)
    served.add_request(prompt, GREEDY, request_id="0")
    for _ in range(chunks):
        served.step()
    served.host = preempt(served.host, "0")
    assert 0 < len(served.host.waiting.first.prompt_logprobs) < len(prompt) - 1
    done = finish(served)["0"]
    [straight] = engine(pair, prefill_chunk=24).generate([prompt], GREEDY)
    mine, theirs = ([record.logprob for record in one.prompt_logprobs[1:]] for one in (done, straight))
    np.testing.assert_allclose(mine, theirs, atol=TOLERANCE, rtol=0)
    assert [record.token_id for record in done.prompt_logprobs[1:]] == list(prompt[1:])
    assert [record.token_id for record in done.logprobs] == list(done.token_ids) == list(straight.token_ids)
    # What it knew by then lies in pages that need not be run again.
    assert done.metrics.cached_tokens >= 16 * (chunks - 1) or pair == HYBRID


@pytest.mark.parametrize("way", ["fork", "snapshot", "another draft"])
@pytest.mark.parametrize("steps", mostly_slow(3, 1))
def test_updates_before_and_after_a_fork_or_snapshot_hold_each_logprob_once(way, steps, tmp_path):
    served, prompt = engine(PAIR), prompts(PAIR)[2]
    [straight] = engine(PAIR).generate([prompt], GREEDY)
    served.add_request(prompt, GREEDY, request_id="0")
    before = [update for _ in range(steps) for update in served.step()]
    served._advance()  # what this brings is undelivered
    if way == "fork":
        served = served.fork()
    elif way == "another draft":
        served = served.fork(draft=str(GOLDEN / "recall-dflash1"))
    else:
        served.snapshot(tmp_path / "snapshot")
        served = Engine.restore(tmp_path / "snapshot", engine(PAIR))
    updates = [*before]
    while served.has_work:
        updates += served.step()
    assert sum((update.logprobs for update in updates), ()) == updates[-1].completion.logprobs
    assert [len(update.logprobs) for update in updates] == [len(update.token_ids) for update in updates]
    assert [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None] == [
        straight.prompt_logprobs
    ]
    if way == "another draft":
        assert [record.token_id for record in updates[-1].completion.logprobs] == list(straight.token_ids)
    else:
        assert known(updates[-1].completion) == known(straight)


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_each_output_token_has_one_logprob_however_the_output_ends(length):
    tokenizer = byte_tokenizer()
    served, prompt = Engine(models(PAIR), engine(PAIR).config, tokenizer=tokenizer), prompts(PAIR)[1]
    whole = served.generate([prompt], {**GREEDY, "logprobs": 1})[0]
    token = whole.token_ids[length - 1]
    for ending in ({"stop_token_ids": [token]}, {"stop": [tokenizer.decode([token])]}, {"max_tokens": length}):
        [cut] = served.generate([prompt], {**GREEDY, "logprobs": 1, **ending})
        assert cut.logprobs == whole.logprobs[: len(cut.token_ids)]
        assert len(cut.token_ids) <= length


def test_records_have_the_tokens_own_text_where_there_is_a_tokenizer():
    tokenizer, prompt = byte_tokenizer(), prompts(PAIR)[1]
    served = Engine(models(PAIR), engine(PAIR).config, tokenizer=tokenizer)
    [completion] = served.generate([prompt], {**GREEDY, "max_tokens": 6})
    for record in (*completion.logprobs, *completion.prompt_logprobs[1:]):
        for one in (record, *record.top):
            assert one.text == tokenizer.token_text(one.token_id)
    assert "".join(record.text for record in completion.logprobs) == completion.text
    assert all(record.text is None for record in engine(PAIR).generate([prompt], GREEDY)[0].logprobs)


def test_an_aborted_request_has_the_logprobs_of_what_it_produced():
    served = engine(PAIR)
    served.add_request(prompts(PAIR)[0], GREEDY, request_id="0")
    for _ in range(3):
        served.step()
    completion = served.abort("0")
    assert [record.token_id for record in completion.logprobs] == list(completion.token_ids) != []
    assert len(completion.prompt_logprobs) == len(prompts(PAIR)[0])
    served.add_request(prompts(PAIR)[0], GREEDY, request_id="1")
    completion = served.abort("1")
    assert completion.logprobs == () and completion.prompt_logprobs == (None,)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1, 1.5, True, "5"])
def test_other_numbers_are_refused_by_name_with_the_most_there_can_be(name, value):
    with pytest.raises(RequestError, match=rf"sampling\.{name} is .*0 to {MAX_LOGPROBS}, or null"):
        SamplingParams().override({name: value})
    assert getattr(SamplingParams().override({name: None}), name) is None


def test_more_tokens_than_a_vocabulary_has_are_all_of_it():
    target = load_target(GOLDEN / "recall-target")
    head = target.params.lm_head
    assert head is not None
    few = dataclasses.replace(target.config, vocab_size=8, eos_token_ids=())
    params = target.params.replace(embedding=target.params.embedding[:8], lm_head=head.with_outputs(jnp.arange(8)))
    served = Engine(Models(params, few), EngineConfig(max_slots=1, max_model_len=32))
    [completion] = served.generate([[1, 2, 3]], {"max_tokens": 3, "logprobs": 20})
    for record in completion.logprobs:
        assert sorted(one.token_id for one in record.top) == list(range(8))
        assert abs(sum(np.exp(one.logprob) for one in record.top) - 1) < 1e-5


@pytest.mark.parametrize("wanted", [{"logprobs": 0}, {"prompt_logprobs": 0}, {"logprobs": 0, "prompt_logprobs": 0}])
def test_none_of_the_most_likely_tokens_leaves_the_tokens_own(wanted):
    [completion] = engine(PAIR).generate(
        prompts(PAIR)[:1], {**GREEDY, "logprobs": None, "prompt_logprobs": None, **wanted}
    )
    assert (completion.logprobs is None, completion.prompt_logprobs is None) == (
        "logprobs" not in wanted,
        "prompt_logprobs" not in wanted,
    )
    records = [*(completion.logprobs or ()), *(completion.prompt_logprobs or (None,))[1:]]
    assert all(record.top == () and record.rank >= 1 for record in records)


def test_a_log_probability_that_is_missing_or_of_another_token_is_noticed():
    served = engine(PAIR, prefill_chunk=16)
    served.add_request(prompts(PAIR)[3], GREEDY, request_id="0")
    served.add_request(prompts(PAIR)[0], {"max_tokens": 20}, request_id="unasked")
    for _ in range(5):
        check_state(served.models, served.host, served.state)
        served.step()
    sequence = served.host.running.get("0")
    for name in ("logprobs", "prompt_logprobs"):
        records = getattr(sequence, name)
        for damaged in (records[:-1], (records[0], *records)):
            broken = served.host.running.replace("0", dataclasses.replace(sequence, **{name: Log(damaged)}))
            host = dataclasses.replace(served.host, running=broken)
            with pytest.raises(InvariantError, match="logprobs_complete: request '0' has"):
                check_state(served.models, host, served.state)
