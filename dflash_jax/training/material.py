"""Prompts about text that the target wrote before.

A message that the target writes itself seldom brings the text it speaks of. `Material` makes such prompts
from a corpus: a request with `{text}` in it is given a passage of an earlier answer, and any other
request is said after the beginning of an earlier conversation, as a second turn.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterable, Sequence

from dflash_jax.errors import ConfigError

Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A question and the sentences of its answer."""

    question: str
    sentences: tuple[str, ...]

    @staticmethod
    def of(question: str, answer: str) -> Exchange:
        """Splits an answer into the sentences that it completes."""
        return Exchange(question, tuple(re.findall(r"\S.*?[.!?](?=\s|$)", answer, re.DOTALL)))

    def passage(self, words: int) -> str:
        """The first sentences, as many as have `words` words at most; empty if the first has more."""
        taken: list[str] = []
        for sentence in self.sentences:
            if len(" ".join([*taken, sentence]).split()) > words:
                break
            taken.append(sentence)
        return " ".join(taken)


class Material:
    """Draws prompts from exchanges and requests.

    Args:
      exchanges: what was said before.
      requests: what to ask, with `{text}` where a passage belongs, or without as a second turn.
      words: most words of a passage or of a first answer.

    Raises:
      ConfigError: there are no requests, or no exchange to ask them about.
    """

    def __init__(self, exchanges: Iterable[Exchange], requests: Sequence[str], words: int = 60):
        self._words = words
        self._requests = [request for request in requests if request.strip()]
        # A code block has no sentences, and a summary of one sentence is that sentence.
        self._exchanges = [
            exchange
            for exchange in exchanges
            if exchange.question
            and len(exchange.passage(words).split()) >= words // 2
            and "```" not in exchange.passage(words)
        ]
        if not self._requests:
            raise ConfigError("`requests` names a file without a request; write one in each line")
        if not self._exchanges:
            raise ConfigError(f"`material` has no answer with a passage of {words // 2} to {words} words")

    def messages(self, rng: random.Random) -> Messages:
        """One prompt: the same for the same state of `rng`."""
        exchange, request = rng.choice(self._exchanges), rng.choice(self._requests)
        passage = exchange.passage(self._words)
        if "{text}" in request:
            return [{"role": "user", "content": request.replace("{text}", passage)}]
        return [
            {"role": "user", "content": exchange.question},
            {"role": "assistant", "content": passage},
            {"role": "user", "content": request},
        ]
