"""A request's text as it grows, cut at its stop strings."""

from __future__ import annotations

from dflash_jax.checkpoints import Tokenizer


class TextStream:
    """Detokenises one request and watches for its stop strings.

    Text that might be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self._detokenizer = tokenizer.detokenizer()
        self._stop = stop
        self._held = ""
        self._released: list[str] = []
        self._stopped = False

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token: int) -> tuple[str, bool]:
        """Takes a token; returns the text that is now final, and whether a stop string is complete."""
        self._held += self._detokenizer.push(token)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._stopped = True
            return self._release(min(found)), True
        return self._release(len(self._held) - self._longest_beginning()), False

    def finish(self) -> str:
        """The text that was held back, now that no more comes; none after a stop string."""
        if self._stopped:
            return ""
        self._held += self._detokenizer.finish()
        return self._release(len(self._held))

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._released.append(text)
        return text
