"""Prompts about text that the target wrote before.

A message that the target writes itself seldom brings the text it speaks of. `Material` makes such prompts
from a corpus: a request with `{text}` in it is given a passage of an earlier answer, and any other
request is said after the beginning of an earlier conversation, as a second turn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from dflash_jax.errors import ConfigError

Messages = list[dict[str, str]]


def passage(text: str, words: int) -> str:
    """The first sentences that a text completes, as many as have `words` words at most; empty if the first has more."""
    taken: list[str] = []
    for sentence in re.findall(r"\S.*?[.!?](?=\s|$)", text, re.DOTALL):
        if len(" ".join([*taken, sentence]).split()) > words:
            break
        taken.append(sentence)
    return " ".join(taken)


class Material:
    """Draws prompts from what was said before, and requests.

    Args:
      said: questions and their answers.
      requests: what to ask, with `{text}` where a passage belongs, or without as a second turn.
      words: most words of a passage or of a first answer.

    Raises:
      ConfigError: there are no requests, or no answer to ask them about.
    """

    def __init__(self, said: Iterable[tuple[str, str]], requests: Sequence[str], words: int = 60):
        self._requests = [request for request in requests if request.strip()]
        passages = ((question, passage(answer, words)) for question, answer in said if question)
        # A code block has no sentences, and a summary of one sentence is that sentence.
        self._said = [
            (asked, text) for asked, text in passages if len(text.split()) >= words // 2 and "```" not in text
        ]
        if not self._requests:
            raise ConfigError("`requests` names a file without a request; write one in each line")
        if not self._said:
            raise ConfigError(f"`material` has no answer with a passage of {words // 2} to {words} words")

    def messages(self, rng: random.Random) -> Messages:
        """One prompt: the same for the same state of `rng`."""
        (question, text), request = rng.choice(self._said), rng.choice(self._requests)
        if "{text}" in request:
            return [{"role": "user", "content": request.replace("{text}", text)}]
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": text},
            {"role": "user", "content": request},
        ]
