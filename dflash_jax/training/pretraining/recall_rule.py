"""The recall rule: text that can only be continued by looking at what stands where before it.

A sequence is BOS, ten random tokens, and then x[n] = x[n - 10] if x[n - 1] is no multiple of 3, else a fixed
permutation of x[n - 10]. So a token depends on the content and the position of what came before, and each on
the one before it: a draft whose context is another's, or is shifted by one token, drafts visibly other blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from dflash_jax.training.config import RuleSection
from dflash_jax.training.data.records import TokenSequence

BOS = 60
CONTENT = 56
PERIOD = 10


def rule_permutation(seed: int) -> Int[np.ndarray, " content"]:
    """What each token below CONTENT becomes after a multiple of 3."""
    return np.random.default_rng([seed, 0]).permutation(CONTENT).astype(np.int32)


def follow_rule(
    beginnings: Int[np.ndarray, "sequences period"], length: int, permutation: Int[np.ndarray, " content"]
) -> Int[np.ndarray, "sequences length"]:
    """The sequences of a length that begin with BOS and the given tokens, PERIOD of them below CONTENT."""
    tokens = np.zeros((len(beginnings), length), np.int32)
    tokens[:, 0], tokens[:, 1 : PERIOD + 1] = BOS, beginnings
    for place in range(PERIOD + 1, length):
        source = tokens[:, place - PERIOD]
        tokens[:, place] = np.where(tokens[:, place - 1] % 3 != 0, source, permutation[source])
    return tokens


def rule_sequences(section: RuleSection) -> Iterator[TokenSequence]:
    """Sequences with random beginnings, which are their prompts."""
    beginnings = np.random.default_rng([section.seed, 1]).integers(0, CONTENT, (section.sequences, PERIOD))
    for tokens in follow_rule(beginnings, section.length, rule_permutation(section.seed)):
        yield TokenSequence(tokens, PERIOD + 1)
