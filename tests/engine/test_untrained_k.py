"""More drafted tokens than a draft was trained for: allowed, and said so."""

from __future__ import annotations

import logging

import pytest

from tests.pairs import engine


@pytest.mark.parametrize(("k", "warned"), [(None, False), (7, False), (8, True), (99, True)])
def test_a_k_above_the_trained_one_is_warned_of_with_the_trained_size(k, warned, caplog):
    with caplog.at_level(logging.WARNING, logger="dflash_jax"):
        engine("recall-dflash2", k=k)
    said = [record.getMessage() for record in caplog.records if "draft.k" in record.getMessage()]
    assert len(said) == warned
    assert all(f"draft.k is {k}" in text and "trained to propose 7 tokens (block_size 8)" in text for text in said)
