"""What configs say about themselves."""

from __future__ import annotations

import dataclasses

from dflash_jax.models.config import untrained_k
from tests.pairs import models


def test_more_drafted_tokens_than_a_draft_was_trained_for_are_named():
    draft = dataclasses.replace(models("recall-dflash2").draft_config, block_size=8)
    assert untrained_k(draft, 7) is None
    assert untrained_k(draft, 99) == (
        "draft.k is 99, but the draft was trained to propose 7 tokens (block_size 8); those after them are noise that "
        "costs time and is rarely accepted"
    )
