"""Text as it grows: whole characters only, and nothing of a stop string ever shown unless it is asked for."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from dflash_jax import Engine, EngineConfig, RequestError, SamplingParams
from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.request import Request
from dflash_jax.engine.text import TextStream
from tests.pairs import SIZES, models, prompts
from tests.text.vocabularies import EVERY

BYTE_LEVEL = EVERY["byte-level"]
MARK = "\N{REPLACEMENT CHARACTER}"


def stream_of(stop: tuple[str, ...] = (), **sampling: Any) -> TextStream:
    return TextStream(BYTE_LEVEL, Request("r", (1,), SamplingParams(stop=stop, **sampling), (), 64))


def feed(text: str | list[int], stop: tuple[str, ...], **sampling: Any) -> tuple[list[str], bool, TextStream]:
    """The text that each token made final, whether a stop string was met, and the stream."""
    stream, pieces = stream_of(stop, **sampling), []
    for token in BYTE_LEVEL.encode(text) if isinstance(text, str) else text:
        _, stopped = stream.push([token])
        pieces.append(stream.take_text())
        if stopped:
            return pieces, True, stream
    return pieces, False, stream


def test_a_character_appears_when_its_last_byte_does():
    pieces, _, _ = feed("a€b", ())
    assert pieces == ["a", "", "", "€", "b"]


def test_an_incomplete_character_at_the_end_is_not_swallowed():
    stream = stream_of()
    stream.push(BYTE_LEVEL.encode("a€")[:-1])
    assert stream.finish() == MARK
    assert stream.text == "a" + MARK


def test_a_stop_string_ends_the_text_before_itself():
    pieces, stopped, stream = feed("one two END three", ("END",))
    assert stopped and stream.text == "one two " == "".join(pieces)
    assert stream.finish() == ""
    assert stream.text == "one two "


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not():
    pieces, stopped, _ = feed("EN or E", ("END",))
    assert not stopped
    assert pieces[:3] == ["", "", "EN "]


def test_held_back_text_comes_out_at_the_end():
    _, stopped, stream = feed("the EN", ("END",))
    assert not stopped and stream.text == "the "
    assert stream.finish() == "EN"
    assert stream.text == "the EN"


def test_a_stop_string_that_the_end_of_the_text_completes_is_cut_off():
    _, stopped, stream = feed(BYTE_LEVEL.encode("a€")[:-1], (MARK,))
    assert not stopped
    assert stream.finish() == "" and stream.text == "a"


def test_the_first_of_several_stop_strings_counts():
    _, stopped, stream = feed("a, b. c", (".", ","))
    assert stopped and stream.text == "a"


def test_overlapping_beginnings_are_all_watched():
    _, stopped, stream = feed("aab", ("ab",))
    assert stopped and stream.text == "a"


def test_tokens_past_a_stop_string_are_not_taken():
    stream, tokens = stream_of(("b",)), BYTE_LEVEL.encode("abcd")
    assert stream.push(tokens) == (tuple(tokens[:2]), True)
    assert stream.push(tokens) == ((), True)
    assert stream.text == "a"


# A stop string that is one special token.

END = BYTE_LEVEL.special_id("<|im_end|>")


def test_a_stop_string_that_is_a_special_token_ends_the_text_at_its_id():
    tokens = [*BYTE_LEVEL.encode("ab€")[:-1], END, *BYTE_LEVEL.encode("c")]
    stream = stream_of(("<|im_end|>",))
    assert stream.push(tokens) == (tuple(tokens[:-1]), True)
    assert stream.finish() == ""
    assert stream.text == "ab" + MARK


def test_it_is_also_found_where_it_is_written_out():
    written = [token for character in "a<|im_end|>" for token in BYTE_LEVEL.encode(character)]
    _, stopped, stream = feed(written, ("<|im_end|>",))
    assert stopped and stream.text == "a"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_token_among_stop_strings_with_either_option(skip, include):
    tokens = [*BYTE_LEVEL.encode("<s>a"), END]
    stream = stream_of(("<|im_end|>",), skip_special_tokens=skip, include_stop_str_in_output=include)
    assert stream.push(tokens) == (tuple(tokens), True)
    assert stream.text == ("" if skip else "<s>") + "a" + ("<|im_end|>" if include else "")


def test_special_tokens_show_and_are_searched_when_they_are_not_skipped():
    _, stopped, stream = feed(BYTE_LEVEL.encode("<s>a</s>b"), ("a</",), skip_special_tokens=False)
    assert stopped and stream.text == "<s>"
    _, stopped, stream = feed(BYTE_LEVEL.encode("<s>a</s>b"), ("a</",))
    assert not stopped and stream.text == "ab"


def test_the_stop_string_ends_the_text_when_it_is_included():
    pieces, stopped, stream = feed("one END two", ("END",), include_stop_str_in_output=True)
    assert stopped and stream.text == "one END" == "".join(pieces)
    assert stream.finish() == ""


PARTS = ["a", "b", "ab", "€", "<s>", "<|im_end|>", "x"]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    stop=st.lists(st.sampled_from(["ab", "b€", "aa", "<|im_end|>", "<s>", "xab", "b"]), max_size=3),
    skip=st.booleans(),
    include=st.booleans(),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_text_is_cut_at_the_same_place_however_the_tokens_come(parts, stop, skip, include, cuts):
    tokens = BYTE_LEVEL.encode("".join(parts))
    options = {"stop": tuple(stop), "skip_special_tokens": skip, "include_stop_str_in_output": include}
    one_by_one, at_once, in_pieces = stream_of(**options), stream_of(**options), stream_of(**options)
    taken, text = [], ""
    for token in tokens:
        taken += one_by_one.push([token])[0]
        text += one_by_one.take_text()
    text += one_by_one.finish()
    assert list(at_once.push(tokens)[0]) == taken
    assert at_once.take_text() + at_once.finish() == text == at_once.text == one_by_one.text
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for first, last in itertools.pairwise(bounds):
        in_pieces.push(tokens[first:last])
    in_pieces.finish()
    assert in_pieces.text == text
    # Made anew from what was taken, as an engine does that goes on from a snapshot.
    again = stream_of(**options)
    assert again.push(taken)[0] == tuple(taken)
    again.finish()
    assert again.text == text
    if not include and skip:
        assert not any(string in text for string in stop)


@pytest.mark.parametrize("stop", [(), ("END", "<|im_end|>", "\n\n")], ids=["no stop strings", "three"])
def test_replaying_a_long_answer_is_cheap(stop):
    tokens = BYTE_LEVEL.encode("the quick brown fox, " * 1500)
    start = time.perf_counter()
    stream_of(stop).push(tokens)
    assert time.perf_counter() - start < 1.0


# In an engine, whose model of 64 tokens gets a character for each, and one of its answer's tokens is special.

PROMPT = prompts("recall-dflash2")[0]
PLAIN = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def answer() -> tuple[int, ...]:
    return Engine(models(None), EngineConfig(**SIZES)).generate([PROMPT], PLAIN)[0].token_ids


@pytest.fixture(scope="module")
def special(answer) -> int:
    """A token of the answer that comes late and for the first time."""
    return next(token for at, token in enumerate(answer) if at > 4 and token not in answer[:at])


@pytest.fixture(scope="module")
def served(special) -> Engine:
    pieces = [chr(0x21 + token) for token in range(64)]
    pieces[special] = "<end>"
    backend = Backend(tokenizer_models.BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Engine(
        models(None), EngineConfig(**SIZES), tokenizer=Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    )


def shown(tokens: tuple[int, ...]) -> str:
    return "".join(chr(0x21 + token) for token in tokens)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_an_answer_ends_at_a_special_token_that_is_a_stop_string(served, answer, special, skip, include):
    options = {"stop": "<end>", "skip_special_tokens": skip, "include_stop_str_in_output": include}
    updates = list(served.stream([PROMPT], {**PLAIN, **options}))
    completion = updates[-1].completion
    assert completion is not None
    assert completion.token_ids == answer[: answer.index(special) + 1]
    assert completion.finish_reason == "stop"
    assert completion.text == shown(completion.token_ids[:-1]) + ("<end>" if include else "")
    assert "".join(update.text or "" for update in updates) == completion.text


def test_an_answers_special_tokens_are_shown_when_they_are_not_skipped(served, answer, special):
    (completion,) = served.generate([PROMPT], {**PLAIN, "skip_special_tokens": False})
    assert "<end>" in str(completion.text)
    assert str(completion.text).replace("<end>", chr(0x21 + special)) == shown(answer)


def test_a_stop_string_over_several_tokens_is_included_when_it_is_asked_for(served, answer):
    stop = shown(answer[1:3])
    (with_it,) = served.generate([PROMPT], {**PLAIN, "stop": stop, "include_stop_str_in_output": True})
    (without,) = served.generate([PROMPT], {**PLAIN, "stop": stop})
    assert (with_it.text, without.text) == (shown(answer[:3]), shown(answer[:1]))
    assert with_it.token_ids == without.token_ids == answer[:3]


@pytest.mark.parametrize("name", ["skip_special_tokens", "include_stop_str_in_output"])
def test_options_of_the_text_are_true_or_false(name):
    with pytest.raises(RequestError, match=f"sampling.{name} is 'no'; it must be true or false"):
        SamplingParams().override({name: "no"})
