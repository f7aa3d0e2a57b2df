"""A request's text as it grows, cut at its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.request import Request
from dflash_jax.text.stop_strings import StopStrings


class TextStream:
    """Detokenises one request and watches for its stop strings.

    Text that might be the beginning of a stop string is held back until it is known not to be one. The stream
    is a function of the tokens alone: a new one that is given the same tokens has the same text.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request):
        sampling = request.sampling
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        self._stops = StopStrings(sampling.stop)
        # A special token that is not shown cannot be found in the text.
        hidden = sampling.stop if sampling.skip_special_tokens else ()
        ids = {stop: tokenizer.special_id(stop) for stop in hidden}
        self._stop_of = {token: stop for stop, token in ids.items() if token is not None}
        self._include_stop = sampling.include_stop_str_in_output
        self._held = ""
        self._released: list[str] = []
        self._taken = 0
        self._left = sampling.min_tokens
        self._stopped = False

    @property
    def text(self) -> str:
        """All text that is final so far."""
        return "".join(self._released)

    def push(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        """Takes tokens up to a stop string; returns those taken, and whether a stop string is complete."""
        for count, token in enumerate(tokens):
            if self._stopped:
                return tuple(tokens[:count]), True
            self._push(token)
        return tuple(tokens), self._stopped

    def take_text(self) -> str:
        """The text that has become final since the last call."""
        new = "".join(self._released[self._taken :])
        self._taken = len(self._released)
        return new

    def finish(self) -> str:
        """The text that was held back, now that no more comes; none after a stop string."""
        if self._stopped:
            return ""
        before = len(self._released)
        self._feed(self._detokenizer.finish())
        if not self._stopped:
            self._release(len(self._held))
        return "".join(self._released[before:])

    def _push(self, token: int) -> None:
        self._left -= 1
        stop = self._stop_of.get(token)
        if stop is None:
            self._feed(self._detokenizer.push(token))
            return
        self.finish()
        if not self._stopped and self._include_stop:
            self._released.append(stop)
        self._stopped = True

    def _feed(self, piece: str) -> None:
        if not piece:
            return
        self._held += piece
        found = self._stops.feed(piece)
        rest = piece
        while found is not None and self._left >= 0:
            # One that is complete before `min_tokens` tokens is text like any other.
            rest = rest[found[0] :]
            found = self._stops.feed(rest)
        if found is None:
            self._release(len(self._held) - self._stops.begun)
            return
        end, length = found
        end += len(self._held) - len(piece)
        self._release(end if self._include_stop else end - length)
        self._stopped = True

    def _release(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._released.append(text)
