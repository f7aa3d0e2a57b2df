"""Masks of allowed tokens: one bit a token, as llguidance and others pack them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

WORD = 32
"""Tokens in a word of a mask; token t is bit t % 32 of word t // 32."""

ALL = np.uint32(0xFFFFFFFF)
"""A word in which every token is allowed."""


def unpack_mask(mask: UInt32[Array, "*batch words"], vocab_size: int) -> Bool[Array, "*batch vocab"]:
    """Whether each token is allowed."""
    bits = (mask[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(*mask.shape[:-1], -1)[..., :vocab_size].astype(bool)


def set_tokens(mask: np.ndarray, tokens: Iterable[int], allowed: bool) -> None:
    """Allows or forbids some tokens of a numpy mask."""
    for token in tokens:
        bit = np.uint32(1 << token % WORD)
        mask[token // WORD] = mask[token // WORD] | bit if allowed else mask[token // WORD] & ~bit


def has_tokens(mask: np.ndarray, tokens: Any) -> Any:
    """Whether each token of a numpy array, or a single one, is allowed by a numpy mask."""
    return (mask[tokens // WORD] >> (tokens % WORD).astype(np.uint32)) & np.uint32(1) > 0


def only_token(mask: np.ndarray) -> int | None:
    """The one token that a numpy mask allows, if it is one."""
    (words,) = np.nonzero(mask)
    if len(words) != 1 or (word := int(mask[words[0]])) & (word - 1):
        return None
    return int(words[0]) * WORD + word.bit_length() - 1
