"""Corpora that are damaged, or are something else: one sentence that names the place."""

from __future__ import annotations

import gzip
import json

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.training import shard_paths
from dflash_jax.training.corpora import conversations
from dflash_jax.training.corpora.conversations import Conversation, read_conversations
from dflash_jax.training.corpora.packing import pack_corpus
from dflash_jax.training.data import records

GOOD = {"index": 0, "question": "Why?", "temperature": 0, "prompt_len": 2, "tokens": [1, 2, 3]}


LINE = json.dumps(GOOD).encode() + b"\n"


def changed(**fields):
    return json.dumps({**GOOD, **fields}).encode() + b"\n"


def one_sentence(caught):
    return "\n" not in str(caught.value) and not str(caught.value).endswith(".")


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
        ("a.jsonl", "/dev/zero", "after line 0 .*it is a device"),
        ("a.jsonl", None, "after line 0 .*Is a directory"),
        ("a.jsonl.gz", None, "after line 0 .*Is a directory"),
    ],
    ids=["no gzip", "cut", "wrong sum", "no deflate", "device", "directory", "directory.gz"],
)
def test_a_corpus_that_cannot_be_read_is_named(tmp_path, name, content, says):
    path = tmp_path / name
    if isinstance(content, str):
        path.symlink_to(content)
    else:
        path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"the corpus .*{name} cannot be read {says}") as caught:
        pack_corpus([path], tmp_path / "shards")
    assert one_sentence(caught)


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


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_without_end_does_not_fill_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(conversations, "_LONGEST", 1000)
    path = tmp_path / name
    data = LINE + b"x" * 5000
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(ConfigError, match=rf"{name} line 2 is no conversation \(it has more than"):
        list(read_conversations(path))
