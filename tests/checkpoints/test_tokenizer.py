import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.checkpoints.tokenizer import load_tokenizer
from dflash_jax.errors import CheckpointError, RequestError

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


def byte_level(template=TEMPLATE):
    """A vocabulary of the 256 bytes and two special tokens, 256 and 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["naïve →"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)


TOKENIZER = Tokenizer(byte_level())


def stream(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.text())
@settings(deadline=None)
def test_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, 258), max_size=40))
@settings(deadline=None)
def test_streamed_pieces_join_to_what_decode_gives(ids):
    assert "".join(stream(TOKENIZER, ids)) == TOKENIZER.decode(ids)


def test_incomplete_characters_are_held_back():
    ids = TOKENIZER.encode("a€")
    assert stream(TOKENIZER, ids) == ["a", "", "", "€", ""]
    assert stream(TOKENIZER, ids[:3]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_and_unknown_tokens_stream_as_nothing():
    assert stream(TOKENIZER, [256, 257, 300, 258]) == ["", "", "", "naïve →", ""]


def test_streaming_costs_the_same_per_token_however_long_the_text():
    detokenizer = TOKENIZER.detokenizer()
    ids = TOKENIZER.encode("héllo wörld ") * 2000

    def seconds(tokens):
        start = time.perf_counter()
        for token in tokens:
            detokenizer.push(token)
        return time.perf_counter() - start

    first = min(seconds(ids[:500]) for _ in range(3))
    seconds(ids)
    assert min(seconds(ids[:500]) for _ in range(3)) < 5 * first


def test_sentencepiece_like_vocabularies_stream_too():
    pieces = ["<unk>", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in "€".encode())]
    backend = Backend(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert stream(tokenizer, [1, 3, 2, 4, 5, 6, 2]) == ["a", "c", " b", "", "", "€", " b", ""]
    assert stream(tokenizer, [1, 4, 5])[-1] == "\N{REPLACEMENT CHARACTER}" * 2


def test_chat_is_encoded_up_to_where_the_assistant_speaks():
    ids = TOKENIZER.apply_chat([{"role": "user", "content": "hi"}])
    assert ids == [256, *TOKENIZER.encode("hi!")]
    assert TOKENIZER.has_chat_template
    assert TOKENIZER.vocab_size == 259


def test_chat_that_cannot_be_is_refused():
    with pytest.raises(RequestError, match=r"chat template rejects the messages \(no tools\)"):
        TOKENIZER.apply_chat([{"role": "tool", "content": "hi"}])
    with pytest.raises(RequestError, match="has none"):
        Tokenizer(byte_level(template=None)).apply_chat([{"role": "user", "content": "hi"}])


def test_tokenizer_of_a_directory(golden, tmp_path):
    byte_level().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "grüß dich"}]
    assert loaded.apply_chat(messages) == TOKENIZER.apply_chat(messages)
    assert load_tokenizer(golden / "recall-target") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer files in .* cannot be read"):
        load_tokenizer(tmp_path)
