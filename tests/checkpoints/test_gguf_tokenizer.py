import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from dflash_jax.checkpoints.gguf_tokenizer import read_tokenizer
from dflash_jax.errors import CheckpointError

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


@pytest.fixture(scope="module")
def sentencepiece() -> dict:
    """Vocabulary of a small BPE model that SentencePiece 0.2 trained, and what it encodes texts to."""
    return json.loads((Path(__file__).parent / "sentencepiece.json").read_text(encoding="utf-8"))


def sentencepiece_metadata(model: dict, **more) -> dict:
    fields = {"tokens": model["tokens"], "scores": model["scores"], "token_type": model["token_type"]}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "model": "llama", **more}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def test_a_sentencepiece_vocabulary_encodes_like_sentencepiece(sentencepiece):
    tokenizer = read_tokenizer(sentencepiece_metadata(sentencepiece), FILE)
    assert len(sentencepiece["cases"]) > 5
    for case in sentencepiece["cases"]:
        ids = tokenizer.encode(case["text"])
        assert ids == [1, *case["ids"]]
        assert tokenizer.decode(ids) == case["text"]
        stream = tokenizer.detokenizer()
        assert "".join(map(stream.push, ids)) + stream.finish() == case["text"]


def test_a_sentencepiece_vocabulary_may_go_without_bos_and_space_prefix(sentencepiece):
    metadata = sentencepiece_metadata(sentencepiece, add_bos_token=False, add_space_prefix=False)
    tokenizer = read_tokenizer(metadata, FILE)
    with_prefix = next(case for case in sentencepiece["cases"] if case["text"] == "Hello world")["ids"]
    ids = tokenizer.encode("Hello world")
    assert ids != with_prefix and 1 not in ids
    assert tokenizer.decode(ids) == "Hello world"


def test_a_sentencepiece_vocabulary_without_scores_is_refused(sentencepiece):
    metadata = sentencepiece_metadata(sentencepiece)
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match=r"0 scores for 420 tokens"):
        read_tokenizer(metadata, FILE)
