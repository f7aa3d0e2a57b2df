"""Text of what requests produce, as far as there is a tokenizer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.text import TextStream


@runtime_checkable
class Reader(Protocol):
    """Makes text of a request's tokens. What it returns depends on its arguments alone."""

    def __call__(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None, bool]:
        """Reads tokens that follow a request's output.

        Returns:
          The tokens up to the one that completes a stop string, the text that they make final (None without a
          tokenizer), and whether there was a stop string.
        """
        ...

    def token_text(self, token: int) -> str | None:
        """A token's own text; None without a tokenizer."""
        ...

    def finish(self, sequence: Sequence) -> tuple[str | None, str | None]:
        """A finished request's whole text, and the end of it that no update had; None without a tokenizer."""
        ...


class TokenReader:
    """For a model without a tokenizer: there is no text, and so there are no stop strings."""

    def __call__(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None, bool]:
        """All tokens."""
        return tokens, None, False

    def token_text(self, token: int) -> str | None:
        """No text."""
        return None

    def finish(self, sequence: Sequence) -> tuple[str | None, str | None]:
        """No text."""
        return None, None


NO_TEXT = TokenReader()
"""The reader where there is no tokenizer."""


class TextReader:
    """Keeps a text stream for each request in flight, so that each token is decoded once.

    A stream only caches what follows from the tokens. One whose position is not the request's, as after a restored
    snapshot or a step that raised, is built again from the request's output.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def __call__(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None, bool]:
        """See `Reader`."""
        stream = self._stream(sequence)
        taken, complete = stream.push(tokens)
        return taken, stream.text.take_text(), complete

    def token_text(self, token: int) -> str | None:
        """See `Reader`."""
        return self._tokenizer.token_text(token)

    def finish(self, sequence: Sequence) -> tuple[str | None, str | None]:
        """See `Reader`."""
        stream = self._stream(sequence)
        self.forget(sequence.id)
        rest = stream.text.finish()
        return stream.text.text, rest

    def forget(self, request_id: str) -> None:
        """Drops a request's stream."""
        self._streams.pop(request_id, None)

    def _stream(self, sequence: Sequence) -> _Stream:
        stream = self._streams.get(sequence.id)
        if stream is None or not stream.is_at(sequence):
            stream = _Stream(TextStream(self._tokenizer, sequence.request), sequence)
            self._streams[sequence.id] = stream
        return stream


class _Stream:
    """A text stream and where in the output it is."""

    def __init__(self, text: TextStream, sequence: Sequence):
        self.text = text
        self._request = sequence.request
        self._read = 0
        self._last: int | None = None
        self.push(tuple(sequence.output))
        text.take_text()

    def push(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        taken, complete = self.text.push(tokens)
        if taken:
            self._read, self._last = self._read + len(taken), taken[-1]
        return taken, complete

    def is_at(self, sequence: Sequence) -> bool:
        """Whether what was read is the request's output."""
        output = sequence.output
        last = output[-1] if output else None
        return self._request is sequence.request and self._read == len(output) and self._last == last
