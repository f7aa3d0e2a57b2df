"""The mean of drafts."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from safetensors.flax import load_file

from dflash_jax.checkpoints import load_draft, save_draft
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.training import average_drafts
from tests.pairs import GOLDEN

DRAFT = GOLDEN / "recall-dflash2"


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The golden draft with every weight 2 more."""
    directory = tmp_path_factory.mktemp("changed") / "draft"
    loaded = load_draft(DRAFT)
    save_draft(directory, loaded.config, jax.tree.map(lambda leaf: leaf + 2, loaded.params))
    return directory


@pytest.mark.parametrize(("times", "more"), [(1, 1.0), (3, 0.5)])
def test_every_weight_is_the_mean_and_who_is_named_twice_counts_twice(changed, tmp_path, times, more):
    average_drafts([DRAFT] * times + [changed], tmp_path / "mean", "float32")
    before, mean = load_draft(DRAFT), load_draft(tmp_path / "mean")
    assert mean.config == before.config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a + more, b, atol=1e-6), before.params, mean.params)


def test_the_mean_is_taken_in_float32_and_saved_in_bfloat16(changed, tmp_path):
    average_drafts([DRAFT, changed], tmp_path / "wide", "float32")
    average_drafts([DRAFT, changed], tmp_path / "mean")
    wide, mean = load_draft(tmp_path / "wide"), load_draft(tmp_path / "mean")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype("bfloat16"), b), wide.params, mean.params)
    assert set(map(str, {leaf.dtype for leaf in load_file(tmp_path / "mean" / "model.safetensors").values()})) == {
        "bfloat16"
    }


def test_what_has_no_mean_is_refused(changed, tmp_path):
    with pytest.raises(ConfigError, match="two drafts or more, and 1 was given"):
        average_drafts([DRAFT], tmp_path / "mean")
    with pytest.raises(ConfigError, match=r"recall-dflash1 is not of the same config as .*recall-dflash2"):
        average_drafts([DRAFT, GOLDEN / "recall-dflash1"], tmp_path / "mean")
    with pytest.raises(CheckpointError, match="recall-dflash3"):
        average_drafts([DRAFT, GOLDEN / "recall-dflash3"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    with pytest.raises(CheckpointError):
        average_drafts([DRAFT, changed], DRAFT)
