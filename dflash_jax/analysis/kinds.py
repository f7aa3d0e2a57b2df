"""What kind of text a token is, for counting by kind."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable

from dflash_jax.checkpoints import Tokenizer

KINDS = ("word start", "continuation", "digit", "punctuation", "whitespace", "special", "bytes")
"""Kinds of tokens; "bytes" is a part of a character."""


def token_kinds(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A function from a token id to its kind, one of `KINDS`.

    A token with a letter is a word start if a space or another separator begins it, and a continuation otherwise; so
    the first word of a line, which nothing separates, counts as a continuation.
    """

    # The text of a token after another one: at the very beginning, some tokenizers strip its space.
    [before, *_] = tokenizer.encode("a") or [0]
    lead = len(tokenizer.decode([before], skip_special_tokens=False))

    @functools.cache
    def kind_of(token: int) -> str:
        if not tokenizer.decode([before, token])[lead:] and tokenizer.decode([token], skip_special_tokens=False):
            return "special"
        return kind_of_text(tokenizer.decode([before, token], skip_special_tokens=False)[lead:])

    return kind_of


def kind_of_text(text: str) -> str:
    """The kind of a piece of text; of no text, and of what is not whole characters, "bytes"."""
    if not text or "�" in text:
        return "bytes"
    if text.isspace():
        return "whitespace"
    if any(character.isalpha() for character in text):
        return "word start" if not _in_word(text[0]) else "continuation"
    if any(unicodedata.category(character).startswith("N") for character in text):
        return "digit"
    return "punctuation"


def _in_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character).startswith("M") or character in "'_\u2019"
