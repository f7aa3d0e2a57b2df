"""Prompts about text that the target wrote before.

A message that the target writes itself seldom contains a text to work on. `InstructionPrompts` makes such prompts
from a corpus: an instruction with `{text}` in it gets a passage of an earlier answer, and any other
instruction becomes the second user turn of an earlier conversation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from dflash_jax.errors import ConfigError

Messages = list[dict[str, str]]


def passage(text: str, max_words: int) -> str:
    """The first sentences of a text, as many as fit into `max_words` words; empty if the first does not."""
    taken: list[str] = []
    for sentence in re.findall(r"\S.*?[.!?](?=\s|$)", text, re.DOTALL):
        if len(" ".join([*taken, sentence]).split()) > max_words:
            break
        taken.append(sentence)
    return " ".join(taken)


class InstructionPrompts:
    """Draws prompts from earlier conversations and instructions.

    Args:
      conversations: questions and their answers.
      instructions: with `{text}` for a passage, or without as a second turn.
      max_words: of a passage or of a first answer; they have at least half of it.

    Raises:
      ConfigError: there are no instructions, or no answer has such a passage.
    """

    def __init__(self, conversations: Iterable[tuple[str, str]], instructions: Sequence[str], max_words: int = 60):
        self._instructions = [instruction for instruction in instructions if instruction.strip()]
        min_words = max_words // 2
        passages = ((question, passage(answer, max_words)) for question, answer in conversations if question)
        # A code block has no sentences, and a summary of one sentence is that sentence.
        self._conversations = [
            (question, text) for question, text in passages if len(text.split()) >= min_words and "```" not in text
        ]
        if not self._instructions:
            raise ConfigError("`instructions` names a file without an instruction; write one in each line")
        if not self._conversations:
            raise ConfigError(f"no answer in `source_corpora` has a passage of {min_words} to {max_words} words")

    def draw(self, rng: random.Random) -> Messages:
        """One prompt: the same for the same state of `rng`."""
        (question, text), instruction = rng.choice(self._conversations), rng.choice(self._instructions)
        if "{text}" in instruction:
            return [{"role": "user", "content": instruction.replace("{text}", text)}]
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": text},
            {"role": "user", "content": instruction},
        ]
