import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from dflash_jax.checkpoints.gguf_tokenizer import read_tokenizer
from dflash_jax.errors import CheckpointError, RequestError

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


def with_twins(**more):
    """A vocabulary where ids 23 and 48 are both "W", and 300 and 301 both "he"."""
    tokens = [*TOKENS[:256], *(f"x{index}" for index in range(256, 300)), "he", "he", "<bos>", "<eot>", "<bos>"]
    tokens[23] = tokens[48] = "W"
    tokens[tokens.index("W", 49)] = "unused"
    fields = {"tokens": tokens, "token_type": [1] * (len(tokens) - 3) + [3, 3, 3], "merges": ["h e"]}
    return tokens, tokenizer("gpt-2", **fields, bos_token_id=302, eos_token_id=303, **more)


def streamed(found, ids):
    stream = found.detokenizer()
    return "".join(map(stream.push, ids)) + stream.finish()


def test_equal_tokens_all_decode_and_stream_to_their_text():
    tokens, found = with_twins()
    assert found.vocab_size == len(tokens)
    for first, second, text in ((23, 48, "W"), (300, 301, "he")):
        assert found.decode([first]) == found.decode([second]) == text
        assert found.decode([first, second, first]) == streamed(found, [first, second, first]) == text * 3
    assert found.decode([302, 23, 304, 303]) == streamed(found, [302, 23, 304, 303]) == "W"


def test_a_text_becomes_the_last_of_equal_tokens_or_the_one_with_a_role():
    _, found = with_twins(add_bos_token=True)
    assert found.encode("WheW") == [302, 48, 301, 48]
    assert found.encode("<bos>") == [302], "one that is in the text already is not put before it again"
    assert found.decode(found.encode("WhWe")) == "WhWe"


def test_a_byte_level_vocabulary_with_twins_decodes_broken_characters_like_one_without():
    _, found = with_twins()
    euro = [tokenizer("gpt-2").encode("\N{EURO SIGN}")]
    plain = tokenizer("gpt-2")
    for ids in (euro[0], euro[0][:2], [*euro[0][:1], *plain.encode("a")]):
        assert found.decode(ids) == plain.decode(ids) == streamed(found, ids)


def test_equal_pieces_of_sentencepiece_all_decode_to_their_text(sentencepiece):
    metadata = sentencepiece_metadata(sentencepiece)
    tokens = metadata["tokenizer.ggml.tokens"] = [*sentencepiece["tokens"], "<0x41>", sentencepiece["tokens"][400]]
    metadata["tokenizer.ggml.scores"] = [*sentencepiece["scores"], 0.0, -1e9]
    metadata["tokenizer.ggml.token_type"] = [*sentencepiece["token_type"], 6, 1]
    found, alone = read_tokenizer(metadata, FILE), read_tokenizer(sentencepiece_metadata(sentencepiece), FILE)
    assert found.vocab_size == len(tokens)
    assert found.decode([400]) == found.decode([len(tokens) - 1]) == alone.decode([400])
    assert found.decode([len(tokens) - 2]) == "A"
    for case in sentencepiece["cases"]:
        ids = found.encode(case["text"])
        assert found.decode(ids) == case["text"]
        assert [tokens[index] for index in ids] == [tokens[index] for index in alone.encode(case["text"])]


def test_a_bos_with_characters_of_the_template_language_is_put_in_front():
    tokens = [*BYTES, "<|im:start|> $A:1"]
    found = tokenizer("gpt-2", tokens=tokens, token_type=[1] * 256 + [3], merges=[], bos_token_id=256, eos_token_id=0)
    assert found.encode("a") == [BYTES.index("a")]
    found = tokenizer(
        "gpt-2",
        tokens=tokens,
        token_type=[1] * 256 + [3],
        merges=[],
        bos_token_id=256,
        eos_token_id=0,
        add_bos_token=True,
    )
    assert found.encode("a") == [256, BYTES.index("a")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", "abc"),
        ("tokens", [1, 2]),
        ("tokens", []),
        ("token_type", [1, 2]),
        ("token_type", ["1"] * len(TOKENS)),
        ("token_type", 7),
        ("merges", ["he"]),
        ("merges", ["nowhere he"]),
        ("merges", 5),
        ("merges", [5]),
        ("bos_token_id", 10**9),
        ("bos_token_id", -1),
        ("eos_token_id", "x"),
        ("padding_token_id", [1]),
        ("pre", 5),
        ("pre", None),
        ("model", ["gpt2"]),
    ],
)
def test_metadata_that_are_no_tokenizers_are_one_sentence(key, value):
    with pytest.raises(CheckpointError, match=r"m\.gguf") as raised:
        tokenizer("gpt-2", **{key: value}) if key != "pre" else tokenizer(value)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", [0.0]),
        ("scores", "x" * 420),
        ("scores", [float("nan")] * 420),
        ("scores", [None] * 420),
        ("unknown_token_id", 420),
        ("tokens", ["a" * 40_000] * 1 + [f"{i}" for i in range(419)]),
    ],
)
def test_sentencepiece_metadata_that_are_no_tokenizers_are_one_sentence(sentencepiece, key, value):
    with pytest.raises(CheckpointError) as raised:
        read_tokenizer(sentencepiece_metadata(sentencepiece, **{key: value}), FILE)
    assert len(str(raised.value)) < 500


def with_templates(**templates):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TOKENS}
    names = {"default": "tokenizer.chat_template", "listed": "tokenizer.chat_templates"}
    return read_tokenizer(
        metadata | {names.get(name, f"tokenizer.chat_template.{name}"): value for name, value in templates.items()},
        FILE,
    )


def test_named_chat_templates_are_read_as_those_of_a_hugging_face_directory():
    messages = [{"role": "user", "content": "he"}]
    found = with_templates(default="plain", tool_use="tools", rag="documents", listed=["rag", "tool_use"])
    assert found.chat_text(messages) == "plain"
    assert found.chat_text(messages, tools=[{"name": "f"}]) == "tools"
    assert found.with_chat_template("rag").chat_text(messages) == "documents"
    # The list of names is for other readers: what it leaves out is read too.
    assert with_templates(default="plain", rag="documents").with_chat_template("rag").chat_text(messages) == "documents"
    undecided = with_templates(rag="documents", tool_use="tools")
    assert not undecided.has_chat_template
    with pytest.raises(RequestError, match="the chat templates rag, tool_use and none of them is its default"):
        undecided.chat_text(messages)


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ({"default": "x", "rag": 5}, r"tokenizer\.chat_template\.rag in m\.gguf is 5, but it must be a text"),
        (
            {"default": "x", "listed": ["rag"]},
            r"tokenizer\.chat_template\.rag in m\.gguf is None, but it must be a text",
        ),
        (
            {"default": "x", "listed": [5]},
            r"tokenizer\.chat_templates in m\.gguf is \[5\], but it must be a list of names",
        ),
        ({"listed": "rag"}, r"chat_templates in m\.gguf is 'rag', but it must be a list of names"),
    ],
)
def test_named_chat_templates_must_be_texts(templates, message):
    with pytest.raises(CheckpointError, match=message):
        with_templates(**templates)


def test_a_chat_template_must_be_text():
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TOKENS}
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template in m\.gguf is 5"):
        read_tokenizer(metadata | {"tokenizer.chat_template": 5}, FILE)
