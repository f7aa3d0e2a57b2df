"""Sequences in files, their division and their order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.errors import ConfigError
from dflash_jax.training import TokenSequence, append_shards, shard_paths, write_shard
from dflash_jax.training.data.dataset import Order, is_held_out, open_dataset
from dflash_jax.training.data.records import SequenceSource, decode_record, encode_record
from tests.training.recall import sequences


def opened(directory, **changes):
    return open_dataset(directory, **{"vocab_size": 64, "max_length": 64, "held_out": 0.2, "min_answer": 2, **changes})


@given(st.lists(st.integers(0, 2**31 - 1)), st.floats(0, 1))
def test_a_record_gives_back_its_sequence(tokens, share):
    prompt_len = round(share * len(tokens))
    found = decode_record(encode_record(TokenSequence(np.asarray(tokens, np.int32), prompt_len)))
    assert found.tokens.tolist() == tokens
    assert found.prompt_len == prompt_len


def test_shards_are_read_in_order_and_partial_ones_are_not(tmp_path):
    made = sequences(6, 20)
    write_shard(tmp_path, 1, made[4:])
    write_shard(tmp_path, 0, made[:4])
    (tmp_path / "00002.partial").write_bytes(b"torn")
    assert [path.name for path in shard_paths(tmp_path)] == ["00000.arrayrecord", "00001.arrayrecord"]
    source = SequenceSource(tmp_path)
    assert [source[i].tokens.tolist() for i in range(len(source))] == [one.tokens.tolist() for one in made]


def test_appended_shards_follow_those_that_are_there(tmp_path):
    made = sequences(7, 20)
    append_shards(tmp_path, made[:3], per_shard=2)
    assert [path.name[:5] for path in append_shards(tmp_path, iter(made[3:]), per_shard=2)] == ["00002", "00003"]
    source = SequenceSource(tmp_path)
    assert [source[i].tokens.tolist() for i in range(len(source))] == [one.tokens.tolist() for one in made]


def test_no_prompt_is_in_both_parts(tmp_path):
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50, (40, 5)).astype(np.int32)
    both = [TokenSequence(np.append(p, rng.integers(0, 50, 9)).astype(np.int32), 5) for p in [*prompts, *prompts]]
    write_shard(tmp_path, 0, both)
    data = opened(tmp_path)
    assert len(data.train) + len(data.held_out) == 80
    assert 4 <= len(data.held_out) <= 32
    parts = [{tuple(data.sequence(int(i)).tokens[:5]) for i in part} for part in (data.train, data.held_out)]
    assert not parts[0] & parts[1]


def test_more_data_moves_nothing_between_the_parts(tmp_path):
    made = sequences(60, 20)
    held = [is_held_out(sequence, 0.3) for sequence in made]
    write_shard(tmp_path, 0, made[:30])
    write_shard(tmp_path, 1, made[30:])
    assert opened(tmp_path, held_out=0.3).held_out.tolist() == [i for i, out in enumerate(held) if out]


def test_order_is_a_new_shuffle_every_epoch_and_a_function_of_the_step(recall_data):
    data = opened(recall_data)
    size = len(data.train)
    order = Order(data, seed=3, per_step=1)
    epochs = [[order.sequences(epoch * size + i)[0] for i in range(size)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == data.train.tolist()
    assert epochs[0] != epochs[1]
    assert Order(data, seed=3, per_step=4).sequences(5) == epochs[0][20:24]
    assert Order(data, seed=4, per_step=4).sequences(5) != epochs[0][20:24]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([TokenSequence(np.array([1, 64], np.int32), 0)], "vocabulary of 64"),
        ([TokenSequence(np.array([1, 2, 3], np.int32), 2)], "fewer than 2 tokens after the prompt"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(tmp_path, made, message):
    write_shard(tmp_path, 0, made)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path)


def test_a_directory_without_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="dflash-jax data pack"):
        opened(tmp_path)
