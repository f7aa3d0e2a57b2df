"""Conversations in flight: the target writes a user's message, and answers it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from dflash_jax.engine import Engine
from dflash_jax.engine.prompts import Prompt
from dflash_jax.errors import RequestError
from dflash_jax.training.corpora.config import CorpusConfig
from dflash_jax.training.corpora.conversations import Conversation, read_conversations
from dflash_jax.training.corpora.instructions import InstructionPrompts
from dflash_jax.training.corpora.questions import read_lines, read_prompts


class ConversationWriter:
    """Turns requests to an engine into conversations.

    Args:
      engine: with the target and its tokenizer.
      config: what to write.
      on_dropped: is told the reason for each conversation that is dropped.

    Attributes:
      first_dropped: the reason for the first conversation that was dropped; empty if none was.
    """

    def __init__(self, engine: Engine, config: CorpusConfig, on_dropped: Callable[[str], None]):
        assert engine.tokenizer is not None
        self._engine, self._config, self._tokenizer = engine, config, engine.tokenizer
        self._on_dropped, self.first_dropped = on_dropped, ""
        self._starters = [""] if config.starters is None else read_lines(config.starters, "starters")
        self._prompts = None if config.prompts is None else read_prompts(config.prompts)
        self._instructions = (
            None if config.instructions is None else self._read_instructions(config.source_corpora, config.instructions)
        )
        # The chat template's text up to the user's message.
        marker = "\N{BLACK SQUARE}message\N{BLACK SQUARE}"
        self._opening = self._tokenizer.chat_text([{"role": "user", "content": marker}]).split(marker)[0]
        self._questions: dict[str, str] = {}
        self._prompt_of: dict[str, tuple[int, ...]] = {}

    def start(self, index: int) -> None:
        """Starts conversation `index`."""
        if self._prompts is not None:
            self._answer(index, self._prompts[index % len(self._prompts)])
            return
        if self._instructions is not None:
            self._answer(index, self._instructions.draw(random.Random(f"{self._config.seed}/request/{index}")))
            return
        starter = random.Random(f"{self._config.seed}/starter/{index}").choice(self._starters)
        self._questions[f"{index}/question"] = starter
        self._run(
            f"{index}/question",
            self._opening + starter,
            temperature=self._config.question_temperature,
            min_p=self._config.question_min_p,
            max_tokens=self._config.question_tokens,
        )

    def step(self) -> Iterator[Conversation]:
        """Runs the engine once. Finished questions are sent back to be answered, finished answers are yielded."""
        for update in self._engine.step():
            completion = update.completion
            if completion is None:
                continue
            if completion.finish_reason == "error":
                self._drop(update.id, str(completion.error))
                continue
            prompt = self._prompt_of.pop(update.id)
            question = self._questions.pop(update.id, "")
            index, turn = update.id.split("/")
            if turn == "answer":
                yield Conversation(
                    index=int(index),
                    question=question,
                    temperature=self._temperature(int(index)),
                    prompt_len=len(prompt),
                    tokens=prompt + completion.token_ids,
                )
                continue
            text = (question + (completion.text or "")).strip()
            # A message cut off by the length limit would train on prompts nobody writes.
            if completion.finish_reason == "stop" and text:
                self._answer(int(index), [{"role": "user", "content": text}])
                continue
            why = f"it did not end within question_tokens {self._config.question_tokens}" if text else "it is empty"
            self._drop(update.id, f"the message that the target began with {question!r} cannot be answered: {why}")

    def _answer(self, index: int, prompt: Prompt) -> None:
        if not isinstance(prompt, str | Mapping) and len(prompt) == 1 and isinstance(prompt[0], Mapping):
            self._questions[f"{index}/answer"] = prompt[0]["content"]
        self._run(
            f"{index}/answer",
            prompt,
            temperature=self._temperature(index),
            max_tokens=self._config.answer_tokens,
        )

    def _run(self, request_id: str, prompt: Prompt, **sampling: float) -> None:
        try:
            tokens = self._engine.tokenize(prompt)
            self._engine.add_request(tokens, {**sampling, "seed": self._seed(request_id)}, request_id=request_id)
        except RequestError as error:
            # Too long for the engine: nothing to learn from a prompt without an answer.
            self._drop(request_id, str(error))
            return
        self._prompt_of[request_id] = tokens

    def _drop(self, request_id: str, reason: str) -> None:
        self._questions.pop(request_id, None)
        self._prompt_of.pop(request_id, None)
        self.first_dropped = self.first_dropped or reason
        self._on_dropped(reason)

    def _read_instructions(self, corpora: Sequence[str], path: str) -> InstructionPrompts:
        conversations = itertools.chain.from_iterable(map(read_conversations, corpora))
        answers = ((one.question, self._tokenizer.decode(one.tokens[one.prompt_len :])) for one in conversations)
        return InstructionPrompts(answers, read_lines(path, "instructions"))

    def _temperature(self, index: int) -> float:
        return self._config.answer_temperatures[index % len(self._config.answer_temperatures)]

    def _seed(self, request_id: str) -> int:
        index, turn = request_id.split("/")
        return random.Random(f"{self._config.seed}/{turn}/{index}").getrandbits(32)
