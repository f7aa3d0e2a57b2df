from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from dflash_jax.checkpoints.gguf_tokenizer import read_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["12", "123", "1234", "he", "hello", "He", "cafe\u0301"]
TOKENS = [*BYTES, *WORDS, "<bos>", "<eot>", "<think>"]
MERGES = ["1 2", "12 3", "123 4", "h e"]
FILE = Path("m.gguf")


def tokenizer(pre, **more):
    return read_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 3) + [3, 3, 4],
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": TOKENS.index("<bos>"),
            "tokenizer.ggml.eos_token_id": TOKENS.index("<eot>"),
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
            **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
        },
        FILE,
    )


def pieces(found, text):
    return [TOKENS[index] for index in found.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["<bos>", "123", "4"]),
    ],
)
def test_numbers_are_cut_as_the_model_was_taught(pre, expected):
    assert pieces(tokenizer(pre), "1234") == expected


def test_bos_is_put_in_front_where_the_metadata_or_the_kind_says_so():
    assert pieces(tokenizer("llama-bpe", add_bos_token=False), "he") == ["he"]
    assert pieces(tokenizer("gpt-2", add_bos_token=True), "he") == ["<bos>", "he"]
    # A chat template writes its own.
    ids = tokenizer("llama-bpe").apply_chat([{"role": "user", "content": "he"}])
    assert [TOKENS[index] for index in ids] == ["<bos>", "he", "<eot>"]


def test_whole_words_win_over_merges_in_llama3_only():
    assert pieces(tokenizer("llama-bpe"), "hello") == ["<bos>", "hello"]
    assert pieces(tokenizer("gpt-2"), "hello") == ["he", "l", "l", "o"]


def test_control_tokens_are_not_shown_and_user_defined_ones_are():
    found = tokenizer("gpt-2")
    ids = found.encode("<bos><think>he<eot>")
    assert [TOKENS[index] for index in ids] == ["<bos>", "<think>", "he", "<eot>"]
    assert found.decode(ids) == "<think>he"
    detokenizer = found.detokenizer()
    assert "".join(map(detokenizer.push, ids)) == "<think>he"


def test_qwen_normalises_composed_characters():
    assert tokenizer("qwen2").encode("cafe\u0301") == tokenizer("qwen2").encode("caf\u00e9")
    assert tokenizer("gpt-2").encode("cafe\u0301") != tokenizer("gpt-2").encode("caf\u00e9")


def test_file_without_a_tokenizer_has_none():
    assert read_tokenizer({}, FILE) is None
