"""Files of text and sequences that are damaged, or are something else: one sentence that names the place."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from dflash_jax.errors import ConfigError
from dflash_jax.training import TokenSequence, append_shards, records, shard_paths, write_shard
from dflash_jax.training.conversations import Conversation, read_conversations
from dflash_jax.training.dataset import most_frequent, open_dataset
from dflash_jax.training.packing import pack_corpus
from dflash_jax.training.questions import read_lines, read_prompts
from tests.training.recall import sequences

GOOD = {"index": 0, "question": "Why?", "temperature": 0, "prompt_len": 2, "tokens": [1, 2, 3]}
LINE = json.dumps(GOOD).encode() + b"\n"


def changed(**fields):
    return json.dumps({**GOOD, **fields}).encode() + b"\n"


def one_sentence(caught):
    return "\n" not in str(caught.value) and not str(caught.value).endswith(".")


# Corpora.


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"index": 0, "ques\n', "not JSON"),
        (b"\n", "not JSON"),
        (b'{"index": 0, "question": "\xff"}\n', "not JSON: invalid unicode"),
        (b"[1, 2]\n", "must be a mapping"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "tokens"}).encode() + b"\n", "'tokens' is missing"),
        (changed(more=1), "unknown key 'more'"),
        (changed(tokens=[1, 2, 4.7]), r"'tokens\.2' is 4\.7: .*integer"),
        (changed(tokens=[1, 2, -1]), r"'tokens\.2' is -1"),
        (changed(tokens=[1, 2, 2**31]), r"'tokens\.2' is 2147483648"),
        (changed(prompt_len=-1), "'prompt_len' is -1"),
        (changed(prompt_len=4), "a prompt of 4 tokens, but only 3"),
        (changed(temperature=float("nan")), "'temperature' is nan"),
    ],
)
def test_a_line_of_a_corpus_that_is_no_conversation_is_named(tmp_path, line, says):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(LINE + line + LINE)
    with pytest.raises(ConfigError, match=rf"corpus\.jsonl line 2 is no conversation \(.*{says}") as caught:
        pack_corpus([path], tmp_path / "shards")
    assert one_sentence(caught) and not (tmp_path / "shards").exists()


def test_text_with_other_ends_of_lines_in_it_is_one_line(tmp_path):
    path = tmp_path / "corpus.jsonl"
    said = Conversation(0, "a\u2028b\x85c\rd", 0.5, 1, (1, 2))
    path.write_text(said.to_json() + "\n" + LINE.decode()[:20], encoding="utf-8")
    assert list(read_conversations(path)) == [said]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", LINE, "after line 0 .*[Nn]ot a gzipped file"),
        ("a.jsonl.gz", gzip.compress(LINE * 50, mtime=0)[:-12], r"after line \d+ \(Compressed file ended"),
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0)[:-8] + bytes(8), "after line 1 .*CRC"),
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0)[:10] + b"\x07" * 40, "after line 0 .*decompressing"),
        ("a.jsonl", None, "after line 0 .*Is a directory"),
        ("a.jsonl.gz", None, "after line 0 .*Is a directory"),
    ],
    ids=["no gzip", "cut", "wrong sum", "no deflate", "directory", "directory.gz"],
)
def test_a_corpus_that_cannot_be_read_is_named(tmp_path, name, content, says):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"the corpus .*{name} cannot be read {says}") as caught:
        pack_corpus([path], tmp_path / "shards")
    assert one_sentence(caught)


# Packing.


@pytest.mark.parametrize("content", [b"", LINE[:-1], changed(prompt_len=3)])
def test_packing_nothing_is_refused(tmp_path, content):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"nothing to pack: no conversation with an answer in .*corpus\.jsonl"):
        pack_corpus([path], tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_shards_of_a_corpus_appear_together_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"".join(changed(index=n, tokens=[1, 2, n]) for n in range(4)))
    write = records.write_shard

    def dies(directory, index, batch):
        if index == 1:
            raise KeyboardInterrupt
        return write(directory, index, batch)

    with monkeypatch.context() as patched:
        patched.setattr(records, "write_shard", dies)
        with pytest.raises(KeyboardInterrupt):
            pack_corpus([path], tmp_path / "shards", per_shard=2)
    assert [one.name for one in tmp_path.iterdir()] == ["corpus.jsonl"]
    assert pack_corpus([path], tmp_path / "shards", per_shard=2) == (4, 12)
    assert len(shard_paths(tmp_path / "shards")) == 2


def test_a_directory_with_something_in_it_is_not_packed_into(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(LINE)
    with pytest.raises(ConfigError, match="is no empty directory"):
        pack_corpus([path], tmp_path)
    with pytest.raises(ConfigError, match="is no empty directory"):
        pack_corpus([path], path)
    (tmp_path / "shards").mkdir()
    assert pack_corpus([path], tmp_path / "shards") == (1, 3)


# Shards.


def opened(directory):
    return open_dataset(directory, vocab_size=64, max_length=64, held_out=0.2, min_answer=2)


def refused(directory, says):
    """By whatever reads shards, with the shard's name."""
    for read in (opened, lambda directory: most_frequent(directory, 9)):
        with pytest.raises(ConfigError, match=rf"the shard .*00001\.arrayrecord is damaged \({says}") as caught:
            read(directory)
        assert one_sentence(caught)


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: b"", "."),
        (lambda content: content[: len(content) // 2], "."),
        (lambda content: content[:-1], "."),
        (lambda content: b"garbage" * 20_000, "."),
        (lambda content: flipped(content, 150), "record 0: .*mismatch"),
    ],
    ids=["empty", "half", "a byte less", "garbage", "a byte flipped"],
)
def test_a_damaged_shard_is_named(tmp_path, damage, says):
    made = sequences(12, 40)
    write_shard(tmp_path, 0, made[:6])
    path = write_shard(tmp_path, 1, made[6:])
    path.write_bytes(damage(path.read_bytes()))
    refused(tmp_path, says)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (b"", "0 bytes"),
        (b"abc", "3 bytes"),
        (np.array([-1, 5, 6], "<i4").tobytes(), "a prompt of -1 tokens in a sequence of 2"),
        (np.array([3, 5, 6], "<i4").tobytes(), "a prompt of 3 tokens in a sequence of 2"),
        (np.array([1, 5, -6], "<i4").tobytes(), "tokens that are no integers"),
    ],
)
def test_a_record_that_is_no_sequence_is_named(tmp_path, record, says):
    write_shard(tmp_path, 0, sequences(6, 40))
    writer = ArrayRecordWriter(str(tmp_path / "00001.arrayrecord"), "group_size:1")
    writer.write(np.array([1, 5, 6], "<i4").tobytes())
    writer.write(record)
    writer.close()
    refused(tmp_path, f"record 1: {says}")


def test_shards_without_sequences_or_tokens_are_refused(tmp_path):
    write_shard(tmp_path, 0, [])
    for read in (opened, lambda directory: most_frequent(directory, 9)):
        with pytest.raises(ConfigError, match="hold no sequence"):
            read(tmp_path)
    write_shard(tmp_path, 1, [TokenSequence(np.array([], np.int32), 0)])
    with pytest.raises(ConfigError, match="have no tokens"):
        most_frequent(tmp_path, 9)


def test_the_most_frequent_tokens_may_be_any(tmp_path):
    write_shard(tmp_path, 0, [TokenSequence(np.array([2**31 - 1, 2**31 - 1, 3], np.int32), 1)])
    assert most_frequent(tmp_path, 1) == ([2**31 - 1], 2 / 3)


@pytest.mark.parametrize(
    "sequence",
    [
        TokenSequence(np.array([1.5, 2.0]), 1),
        TokenSequence(np.array([1, 2**31]), 1),
        TokenSequence(np.array([-1, 2]), 1),
        TokenSequence(np.array([1, 2]), 3),
    ],
)
def test_what_is_no_sequence_is_not_written(tmp_path, sequence):
    with pytest.raises(ConfigError, match=r"sequence 1 for the shard .*00000\.arrayrecord has"):
        append_shards(tmp_path, [TokenSequence(np.array([1, 2]), 1), sequence])
    assert not shard_paths(tmp_path)


def test_shards_are_added_after_the_last_whatever_else_is_there(tmp_path):
    write_shard(tmp_path, 3, sequences(2, 20))
    (tmp_path / "00007.partial").write_bytes(b"torn")
    write_shard(tmp_path, 0, sequences(2, 20)).rename(tmp_path / "mine.arrayrecord")
    assert [path.name for path in append_shards(tmp_path, sequences(2, 20))] == ["00004.arrayrecord"]


# What the target is asked.


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b', "line 2 .*not JSON"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 .*not UTF-8"),
        (b'\n{"text": "a"}\n', "line 2 .*no prompt"),
        (b'{"prompt": 3}\n', "line 1 .*must be a string"),
        (b'{"messages": "hello"}\n', "line 1 .*must be a list"),
        (b"[1]\n", "line 1 .*must be an object"),
        (b"", "has no prompt in it"),
        (b"\n \n", "has no prompt in it"),
        (None, r"\(prompts\) cannot be read \(Is a directory"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(tmp_path, content, says):
    path = tmp_path / "prompts.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl.* {says}") as caught:
        read_prompts(str(path))
    assert one_sentence(caught)
    with pytest.raises(ConfigError, match=r"there is no input file .*absent.* \(prompts\)"):
        read_prompts(str(tmp_path / "absent"))


def test_prompts_are_lines_that_end_where_lines_end(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n\n{"messages": [{"role": "user", "content": "c\x85d"}]}', encoding="utf-8")
    assert read_prompts(str(path)) == [
        [{"role": "user", "content": "a\u2028b"}],
        [{"role": "user", "content": "c\x85d"}],
    ]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("Why\n\nHow\n", ["Why", "", "How"]),
        ("Why\r\nHow", ["Why", "How"]),
        ("\n", [""]),
        ("a\u2028b\x85c\n", ["a\u2028b\x85c"]),
        ("\ufeffWhy\n", ["Why"]),
    ],
)
def test_a_line_of_starters_may_be_empty(tmp_path, content, lines):
    (tmp_path / "starters.txt").write_bytes(content.encode())
    assert read_lines(str(tmp_path / "starters.txt"), "starters") == lines


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"a\nb\n\xff\n", "line 3 is not UTF-8"), (None, "cannot be read")],
)
def test_starters_that_cannot_be_read_are_named(tmp_path, content, says):
    path = tmp_path / "starters.txt"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"starters .*starters\.txt {says}") as caught:
        read_lines(str(path), "starters")
    assert one_sentence(caught)
