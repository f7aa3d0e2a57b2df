"""Token ids to text as they come, whatever the vocabulary and whatever the ids.

In the two kinds of vocabulary that language models have, byte-level ones and SentencePiece-like ones with byte
fallback, a token is some bytes of UTF-8 wherever it stands, and a stream decodes those. In all others a token's text
may depend on its neighbours, and a stream decodes a few of them together.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@runtime_checkable
class Detokenizer(Protocol):
    """Turns tokens into text as they come. Each token costs the same, however many came before."""

    def push(self, token: int) -> str:
        """The text that the token makes final; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What was held back. The detokenizer is spent."""
        ...


def is_panic(error: BaseException) -> bool:
    """Whether code in Rust gave up, which Python does not count among its exceptions."""
    return type(error).__name__ == "PanicException"


class Vocabulary:
    """What the tokens of a tokenizer stand for."""

    def __init__(self, backend: PreTrainedTokenizerFast):
        self._backend = backend
        added = backend.added_tokens_decoder
        self.special = frozenset(token for token in added if added[token].special)
        self._rule = _byte_rule(getattr(backend, "backend_tokenizer", None))
        self._bytes = {skip: _TokenBytes(self._spell, self.special if skip else frozenset()) for skip in (True, False)}

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental detokenizer."""
        if self._rule is not None:
            return _ByteDetokenizer(self._bytes[skip_special_tokens], self._rule)

        def is_text(token: int) -> bool:
            return self.piece(token) is not None and not (skip_special_tokens and token in self.special)

        return _WindowDetokenizer(self._decode, is_text)

    def piece(self, token: int) -> str | None:
        """A token as the vocabulary writes it; None for an id that is no token."""
        if not 0 <= token < 2**31:
            return None
        found = self._backend.convert_ids_to_tokens(token)
        return found if isinstance(found, str) else None

    def text(self, token: int) -> str:
        """A token's text by itself, with the space it may begin with; bytes that are no character are U+FFFD."""
        if self._rule is not None:
            return self._bytes[False][token].decode("utf-8", errors=self._rule.errors)
        return "" if self.piece(token) is None else self._decode([token])

    def _decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens together; none where the tokenizer's own decoder fails on them."""
        try:
            text = self._backend.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        except BaseException as error:
            # An interruption by the user is no Exception.
            if isinstance(error, Exception) or is_panic(error):
                return ""
            raise
        return text if isinstance(text, str) else ""

    def _spell(self, token: int) -> bytes | None:
        assert self._rule is not None
        piece = self.piece(token)
        return None if piece is None else self._rule.bytes_of(piece)


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, looked up once; nothing for tokens that are left out and ids that are no tokens."""

    def __init__(self, spell: Callable[[int], bytes | None], left_out: frozenset[int]):
        super().__init__(dict.fromkeys(left_out, b""))
        self._spell = spell

    def __missing__(self, token: int) -> bytes:
        found = self._spell(token)
        if found is None:
            # Not remembered: there is no end of such ids.
            return b""
        self[token] = found
        return found


class _ByteRule(NamedTuple):
    """How a vocabulary's tokens are bytes.

    Attributes:
      bytes_of: a token's bytes, from how the vocabulary writes it.
      errors: what `codecs` does about bytes that are no UTF-8.
      strip: character that is taken away from the beginning of a text.
      strip_most: how many of them at most.
    """

    bytes_of: Callable[[str], bytes]
    errors: str
    strip: str = ""
    strip_most: int = 0


class _ByteDetokenizer:
    def __init__(self, token_bytes: _TokenBytes, rule: _ByteRule):
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=rule.errors)
        self._strip, self._to_strip = rule.strip, rule.strip_most

    def push(self, token: int) -> str:
        text = self._utf8.decode(self._token_bytes[token])
        return self._stripped(text) if self._to_strip else text

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip):
                self._to_strip = 0
                break
            text, self._to_strip = text[len(self._strip) :], self._to_strip - 1
        return text


_MOST_HELD = 8
"""Tokens held back, at most, for a character they may be a part of; one has four bytes."""


class _WindowDetokenizer:
    """A token's text is what it adds to the text of the few tokens before it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], is_text: Callable[[int], bool]):
        self._decode, self._is_text = decode, is_text
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        if not self._is_text(token):
            return ""
        self._held.append(token)
        text = self._decode([*self._before, *self._held])
        incomplete = text.endswith("\N{REPLACEMENT CHARACTER}")
        return "" if incomplete and len(self._held) < _MOST_HELD else self._release(text)

    def finish(self) -> str:
        return self._release(self._decode([*self._before, *self._held])) if self._held else ""

    def _release(self, text: str) -> str:
        before = self._decode(self._before) if self._before else ""
        # Where what comes after changes what came before, the tokens speak for themselves.
        new = text[len(before) :] if text.startswith(before) else self._decode(self._held)
        self._before = self._held if new else [*self._before, *self._held][-_MOST_HELD:]
        self._held = []
        return new


def _byte_rule(tokenizer: Any) -> _ByteRule | None:
    """How a Rust tokenizer's tokens are bytes, by its decoder; None if they are not."""
    try:
        parts = json.loads(tokenizer.decoder.__getstate__())
    except Exception:  # no Rust tokenizer, no decoder, or one written in Python, which has no such state
        return None
    parts = parts["decoders"] if parts.get("type") == "Sequence" else [parts]
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return _ByteRule(byte_level_bytes, "replace")
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    replacements = [(part.get("pattern", {}).get("String"), part.get("content")) for part in parts[:at]]
    if kinds[:at] != ["Replace"] * at or any(pattern is None for pattern, _ in replacements):
        return None

    def bytes_of(piece: str) -> bytes:
        for pattern, content in replacements:
            piece = piece.replace(pattern, content)
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.encode()

    rest = parts[at + 1 :]
    if kinds[at + 1 :] in ([], ["Fuse"]):
        return _ByteRule(bytes_of, _EACH_BYTE)
    if kinds[at + 1 :] == ["Fuse", "Strip"] and rest[1]["stop"] == 0:
        return _ByteRule(bytes_of, _EACH_BYTE, rest[1]["content"], rest[1]["start"])
    return None


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "dflash_jax.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Byte fallback shows each byte that is part of no character, where `codecs` has one mark for a few of them."""
    assert isinstance(error, UnicodeDecodeError)
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level vocabulary's token.

    GPT-2's `bytes_to_unicode` writes every byte as a printable character. A token with any other
    character is an added one, written as it is.
    """
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_table() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_table()
