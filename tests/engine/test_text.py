"""Text as it grows: whole characters only, and nothing of a stop string ever shown."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.text import TextStream


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each byte."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def feed(tokenizer: Tokenizer, text: str, stop: tuple[str, ...]) -> tuple[list[str], bool, TextStream]:
    stream, pieces = TextStream(tokenizer, stop), []
    for token in tokenizer.encode(text):
        piece, stopped = stream.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True, stream
    return pieces, False, stream


def test_a_character_appears_when_its_last_byte_does(tokenizer):
    pieces, _, _ = feed(tokenizer, "a€b", ())
    assert pieces == ["a", "", "", "€", "b"]


def test_an_incomplete_character_at_the_end_is_not_swallowed(tokenizer):
    stream = TextStream(tokenizer, ())
    for token in tokenizer.encode("a€")[:-1]:
        stream.push(token)
    stream.finish()
    assert stream.text == "a\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_ends_the_text_before_itself(tokenizer):
    pieces, stopped, stream = feed(tokenizer, "one two END three", ("END",))
    assert stopped and stream.text == "one two " == "".join(pieces)
    assert stream.finish() == ""
    assert stream.text == "one two "


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not(tokenizer):
    pieces, stopped, _ = feed(tokenizer, "EN or E", ("END",))
    assert not stopped
    assert pieces[:3] == ["", "", "EN "]


def test_held_back_text_comes_out_at_the_end(tokenizer):
    _, stopped, stream = feed(tokenizer, "the EN", ("END",))
    assert not stopped and stream.text == "the "
    assert stream.finish() == "EN"
    assert stream.text == "the EN"


def test_the_first_of_several_stop_strings_counts(tokenizer):
    _, stopped, stream = feed(tokenizer, "a, b. c", (".", ","))
    assert stopped and stream.text == "a"


def test_overlapping_beginnings_are_all_watched(tokenizer):
    _, stopped, stream = feed(tokenizer, "aab", ("ab",))
    assert stopped and stream.text == "a"
