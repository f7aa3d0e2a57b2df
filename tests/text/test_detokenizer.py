"""A stream of tokens becomes text without an error, whatever the tokens and the vocabulary."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.text.detokenizer import byte_level_bytes
from tests.text.vocabularies import BYTES_ANYWHERE, EVERY

MARK = "\N{REPLACEMENT CHARACTER}"
BYTE_LEVEL, LLAMA = EVERY["byte-level"], EVERY["llama"]
# Ids that are no tokens, among them what no 32-bit integer can hold.
STRANGE = [-(2**70), -1, 10_000, 2**31, 2**32, 2**64, 2**70]


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [tokenizer._backend.convert_tokens_to_ids(piece) for piece in pieces]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """The tokens of single bytes."""
    if tokenizer is not BYTE_LEVEL:
        return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in raw))
    return [_BYTE_LEVEL_ID[byte] for byte in raw]


_BYTE_LEVEL_ID = {byte_level_bytes(BYTE_LEVEL._backend.convert_ids_to_tokens(token))[0]: token for token in range(256)}


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def reference(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    """All at once, as transformers decodes; it knows no ids below 0 or past 32 bits."""
    known = [token for token in ids if 0 <= token < tokenizer.vocab_size]
    return tokenizer._backend.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def test_a_byte_that_decodes_before_bytes_that_never_complete_and_then_text():
    ids = ids_of(LLAMA, "<0x0A>", "<0xF0>", "<0x9F>", "a")
    assert stream(LLAMA, ids) == ["\n", "", "", MARK * 2 + "a", ""]


def test_bytes_become_characters_as_soon_as_they_are_complete():
    for tokenizer in (BYTE_LEVEL, LLAMA):
        ids = byte_ids(tokenizer, "a€\n😀".encode())
        assert stream(tokenizer, ids) == ["a", "", "", "€", "\n", "", "", "", "😀", ""]


def test_a_leading_space_is_dropped_once_wherever_it_comes_from():
    assert stream(LLAMA, ids_of(LLAMA, "<s>", "▁a", "▁a")) == ["", "a", " a", ""]
    assert stream(LLAMA, ids_of(LLAMA, "<0x20>", "▁a")) == ["", " a", ""]
    assert stream(LLAMA, ids_of(LLAMA, "▁▁", "a")) == [" ", "a", ""]


def test_special_tokens_are_shown_when_they_are_asked_for():
    for tokenizer in (BYTE_LEVEL, LLAMA):
        ids = ids_of(tokenizer, "<s>", "a", "<|im_end|>", "</s>")
        assert "".join(stream(tokenizer, ids)) == "a"
        assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "<s>a<|im_end|></s>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<|im_end|></s>"


@pytest.mark.parametrize("name", EVERY)
def test_ids_that_are_no_tokens_have_no_text(name):
    ids = ids_of(EVERY[name], "a", "a")
    mixed = [ids[0], *STRANGE, ids[1], *STRANGE]
    assert "".join(stream(EVERY[name], mixed)) == "".join(stream(EVERY[name], ids))


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, mostly those that make trouble: bytes, special ones, strange ones."""
    one = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(STRANGE)).map(lambda token: [token])
    raw = st.one_of(st.text(min_size=1, max_size=3).map(lambda text: text.encode()), st.binary(max_size=4))
    parts = st.lists(st.one_of(one, raw.map(lambda raw: byte_ids(tokenizer, raw))), max_size=12)
    return parts.map(lambda parts: [token for part in parts for token in part])


def is_defined(name: str, tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether decoding all at once takes back nothing of what it said of a beginning of the tokens."""
    known = [t for t in ids if 0 <= t < tokenizer.vocab_size and not (skip and t in tokenizer._vocabulary.special)]
    if name == "byte-level":
        return True
    if name in BYTES_ANYWHERE:
        # transformers makes marks of all bytes that stand together if one of them is part of no character, where a
        # stream has shown the characters before that one.
        runs = re.findall(
            r"(?:<0x[0-9A-F]{2}>)+", "".join(f"{t}" for t in tokenizer._backend.convert_ids_to_tokens(known))
        )
        raws = [bytes.fromhex(run.replace("<0x", "").replace(">", "")) for run in runs]
        return all(not raw.decode(errors="ignore") or raw == raw.decode(errors="ignore").encode() for raw in raws)
    # With the others what comes after may change what came before, and streams do not wait for the end of a long run of
    # marks.
    try:
        texts = [reference(tokenizer, known[:end], skip_special_tokens=skip) for end in range(len(known) + 1)]
    except BaseException as error:
        assert type(error).__name__ == "PanicException"
        return False
    return MARK not in texts[-1] and all(texts[-1].startswith(text.rstrip(MARK)) for text in texts)


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
def test_fuzz_no_ids_raise_and_the_pieces_join_to_decoding_all_at_once(name, data):
    tokenizer, skip = EVERY[name], data.draw(st.booleans())
    ids = data.draw(tokens_of(tokenizer))
    streamed = "".join(stream(tokenizer, ids, skip_special_tokens=skip))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)
    if is_defined(name, tokenizer, ids, skip):
        assert streamed == reference(tokenizer, ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA], ids=["byte-level", "llama"])
@given(text=st.text())
def test_the_bytes_of_a_text_stream_as_that_text(tokenizer, text):
    assert "".join(stream(tokenizer, byte_ids(tokenizer, ("a" + text).encode()))) == "a" + text


@pytest.mark.parametrize("name", EVERY)
def test_streaming_costs_the_same_per_token_however_long_the_text(name):
    tokenizer = EVERY[name]
    detokenizer = tokenizer.detokenizer()
    ids = [*ids_of(tokenizer, "a"), *byte_ids(tokenizer, b"\xf0\x9f"), *ids_of(tokenizer, "a")] * 250

    def seconds() -> float:
        start = time.perf_counter()
        for token in ids:
            detokenizer.push(token)
        return time.perf_counter() - start

    first = min(seconds() for _ in range(3))
    for _ in range(10):
        seconds()
    assert min(seconds() for _ in range(3)) < 5 * first


def test_a_token_has_a_text_of_its_own_with_its_space_and_special_ones_too():
    [space_a, byte, special] = ids_of(LLAMA, "▁a", "<0xF0>", "<s>")
    assert [LLAMA.token_text(token) for token in (space_a, byte, special)] == [" a", MARK, "<s>"]
    assert [BYTE_LEVEL.token_text(token) for token in byte_ids(BYTE_LEVEL, b"a\xf0")] == ["a", MARK]


@pytest.mark.parametrize("kind", EVERY)
def test_every_id_has_a_text_and_ids_of_no_token_have_none(kind):
    tokenizer = EVERY[kind]
    assert all(isinstance(tokenizer.token_text(token), str) for token in range(tokenizer.vocab_size))
    assert [tokenizer.token_text(token) for token in STRANGE] == [""] * len(STRANGE)
