"""Shards that are damaged, or are something else: one sentence that names the place."""

from __future__ import annotations

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from dflash_jax.errors import ConfigError
from dflash_jax.training import TokenSequence, append_shards, shard_paths, write_shard
from dflash_jax.training.data.dataset import most_frequent, open_dataset
from tests.training.recall import sequences


def one_sentence(caught):
    return "\n" not in str(caught.value) and not str(caught.value).endswith(".")


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
