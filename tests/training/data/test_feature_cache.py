"""The cache of features."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.training import write_shard
from dflash_jax.training.data.dataset import open_dataset
from dflash_jax.training.data.feature_cache import CachedFeatures, Features
from dflash_jax.training.data.features import FeatureExtractor
from tests.training.recall import sequences, target, write_data


def opened(directory, **changes):
    return open_dataset(directory, **{"vocab_size": 64, "max_length": 64, "held_out": 0.2, "min_answer": 2, **changes})


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
