"""Sequences in files, their division and order, anchors, and the cache of features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.errors import ConfigError
from dflash_jax.training import TokenSequence, append_shards, shard_paths, write_shard
from dflash_jax.training.anchors import Anchors, block_labels, sample_anchors
from dflash_jax.training.dataset import Order, is_held_out, open_dataset
from dflash_jax.training.feature_cache import CachedFeatures, Features
from dflash_jax.training.features import FeatureExtractor
from dflash_jax.training.records import SequenceSource, decode_record, encode_record
from dflash_jax.training.rows import draw_rows, plan_rows
from tests.training.recall import sequences, target, write_data


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


@given(st.integers(0, 9), st.integers(1, 20), st.integers(1, 16), st.integers(0, 2**31 - 1))
def test_anchors_are_distinct_places_of_the_answer_that_have_a_successor(prompt_len, length, count, seed):
    lengths = jnp.array([length, 20], jnp.int32)
    anchors = sample_anchors(jax.random.key(seed), jnp.array([prompt_len, 0], jnp.int32), lengths, 20, count)
    for row in range(2):
        found = np.asarray(anchors.positions[row])[np.asarray(anchors.valid[row])]
        places = range(max((prompt_len, 0)[row] - 1, 0), int(lengths[row]) - 1)
        assert len(set(found.tolist())) == len(found) == min(count, len(places))
        assert set(found.tolist()) <= set(places)
        assert np.all(np.diff(np.asarray(anchors.positions[row])) > 0)


def test_labels_end_with_the_sequence():
    tokens = jnp.arange(10, dtype=jnp.int32)[None] + 100
    anchors = Anchors(jnp.array([[2, 5, 6]], jnp.int32), jnp.array([[True, True, False]]))
    blocks, exists = block_labels(tokens, jnp.array([8], jnp.int32), anchors, 4)
    assert blocks[0, 0].tolist() == [102, 103, 104, 105]
    assert exists[0].tolist() == [[True] * 3, [True, True, False], [False] * 3]


def test_rows_are_the_frequent_tokens_and_a_fresh_draw_of_the_others():
    counts = np.array([0, 5, 9, 0, 1, 7])
    plan = plan_rows(counts, unseen=True, frequent=2, drawn=2)
    rows = draw_rows(jax.random.key(0), plan)
    assert rows.tokens[:2].tolist() == [2, 5]
    drawn = set(rows.tokens[2:].tolist())
    assert len(drawn) == 2 and drawn <= {0, 1, 3, 4}
    np.testing.assert_allclose(rows.log_weight, [0, 0, np.log(2), np.log(2)], rtol=1e-6)
    assert len({tuple(draw_rows(jax.random.key(seed), plan).tokens.tolist()) for seed in range(20)}) > 3
    assert plan_rows(counts, unseen=False, frequent=None, drawn=4).always.tolist() == [1, 2, 4, 5]


class Counting(FeatureExtractor):
    calls = 0

    def __call__(self, tokens, layers):
        self.calls += 1
        return super().__call__(tokens, layers)


def cache(directory, data, layers=(1, 2), fingerprint="a", limit_gb=1.0):
    loaded = target()
    extractor = Counting(loaded.params, loaded.config)
    return extractor, CachedFeatures(
        data, extractor, layers, directory=directory, target=fingerprint, dtype="float32", hidden=128, limit_gb=limit_gb
    )


def test_features_are_computed_once_and_are_the_targets(tmp_path, recall_data):
    data = opened(recall_data)
    loaded = target()
    exact = Features(data, FeatureExtractor(loaded.params, loaded.config), (2, 1)).read(7)
    extractor, features = cache(tmp_path, data, (2, 1))
    np.testing.assert_allclose(features.read(7).astype(np.float32), exact, rtol=2**-8, atol=1e-6)
    features.read(7)
    assert extractor.calls == 1
    again, features = cache(tmp_path, data, (1, 2))
    swapped = features.read(7).astype(np.float32)
    np.testing.assert_allclose(swapped, np.roll(exact, 128, axis=1), rtol=2**-8, atol=1e-6)
    assert again.calls == 0


def test_features_of_added_sequences_follow_those_that_are_there(tmp_path):
    made = sequences(12, 40)
    write_shard(tmp_path / "data", 0, made[:6])
    _, features = cache(tmp_path / "features", opened(tmp_path / "data"))
    before = features.read(3)
    write_shard(tmp_path / "data", 1, made[6:])
    extractor, features = cache(tmp_path / "features", opened(tmp_path / "data"))
    np.testing.assert_array_equal(features.read(3), before)
    assert extractor.calls == 0
    features.read(9)
    assert extractor.calls == 1


def test_features_of_another_target_are_refused(tmp_path, recall_data):
    data = opened(recall_data)
    cache(tmp_path, data)
    with pytest.raises(ConfigError, match="not those of this run"):
        cache(tmp_path, data, fingerprint="b")


def test_features_of_other_sequences_are_refused(tmp_path, recall_data):
    cache(tmp_path / "features", opened(recall_data))
    other = opened(write_data(tmp_path / "other", seed=1))
    with pytest.raises(ConfigError, match="of other sequences"):
        cache(tmp_path / "features", other)


def test_features_that_do_not_fit_are_refused(tmp_path, recall_data):
    with pytest.raises(ConfigError, match=r"data\.features_gb"):
        cache(tmp_path, opened(recall_data), limit_gb=1e-6)
