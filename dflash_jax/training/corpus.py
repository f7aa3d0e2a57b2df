"""Text for training, written by the target itself through the engine.

Each conversation is made in two turns of the target. It first writes the user's message: the chat
template is opened at the user's turn, with a few words to start from, and the target goes on. Then it
answers that message, at a temperature it will be drafted at. Conversation i depends only on the seed
and i, so an interrupted run continues where it stopped and gives the same text.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from dflash_jax.checkpoints import load_target
from dflash_jax.engine import Engine, EngineConfig, Models
from dflash_jax.engine.config import TargetSource
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.settings import Section
from dflash_jax.training.config import Dtype
from dflash_jax.training.material import Exchange, Material
from dflash_jax.training.precision import rounded
from dflash_jax.training.records import TokenSequence, append_shards, shard_paths


class CorpusConfig(Section):
    """What `dflash-jax data generate` does.

    Attributes:
      target: who writes.
      engine: how it runs.
      dtype: of the factors of its matrix products.
      output: JSONL file to append conversations to.
      conversations: how many to have in the end.
      starters: text file with one beginning of a user message per line; an empty line starts from nothing.
      prompts: JSONL file with `messages` or `prompt` to answer instead of letting the target ask.
      material, requests: corpora, and a text file of requests about what they say (`training.material`), to answer
        instead of letting the target ask.
      question_temperature, question_min_p, question_tokens: how the user's messages are sampled.
      answer_temperatures: each answer takes one of these, in equal shares.
      answer_tokens: longest answer.
      seed: of everything.
    """

    target: TargetSource
    engine: EngineConfig = EngineConfig(max_slots=32, max_model_len=384, prefill_chunk=256, rounds_per_step=4)
    dtype: Dtype = "float32"
    output: str
    conversations: int = Field(ge=1)
    starters: str | None = None
    prompts: str | None = None
    material: tuple[str, ...] = ()
    requests: str | None = None
    question_temperature: float = 1.0
    question_min_p: float = 0.05
    question_tokens: int = 64
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.5)
    answer_tokens: int = 224
    seed: int = 0

    @model_validator(mode="after")
    def _one_source(self) -> CorpusConfig:
        if bool(self.material) != (self.requests is not None):
            raise ValueError("`material` and `requests` belong together: corpora, and what to ask about their texts")
        given = [name for name in ("starters", "prompts", "requests") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say what to ask; keep one of them")
        return self


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One example: `tokens` begin with a prompt of `prompt_len` tokens, and the target wrote the rest."""

    index: int
    question: str
    temperature: float
    prompt_len: int
    tokens: tuple[int, ...]

    def to_json(self) -> str:
        """One line of the corpus file."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Conversations of a corpus file, which may be gzipped; a torn last line is left out."""
    opened = gzip.open if Path(path).suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                fields = json.loads(line)
                yield Conversation(**{**fields, "tokens": tuple(fields["tokens"])})


def writing_engine(config: CorpusConfig) -> Engine:
    """The engine that writes a corpus.

    Raises:
      ConfigError, CheckpointError: the target cannot be loaded.
    """
    target = load_target(config.target.path, config.engine.dtype)
    models = Models(rounded(target.params, config.dtype), target.config)
    return Engine(models, config.engine, tokenizer=target.tokenizer)


def generate_corpus(engine: Engine, config: CorpusConfig) -> Iterator[Conversation]:
    """Writes the conversations that the output file lacks, yielding each as it is written.

    Raises:
      ConfigError: the target has no chat template, or a file named in the config cannot be read.
    """
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        raise ConfigError(f"target.path {config.target.path!r} has no chat template, so it cannot ask or answer")
    output = Path(config.output)
    done = _repair(output)
    pending = iter(index for index in range(config.conversations) if index not in done)
    writer = _Writer(engine, config)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        while True:
            while (
                len(engine.host.waiting) < engine.config.max_slots // 2 and (index := next(pending, None)) is not None
            ):
                writer.ask(index)
            if not engine.has_work:
                return
            for conversation in writer.step():
                file.write(conversation.to_json() + "\n")
                file.flush()
                yield conversation


def pack_corpus(paths: Sequence[str | Path], directory: str | Path, per_shard: int = 1000) -> tuple[int, int]:
    """Writes the conversations of corpora as shards for training, leaving out what was said before.

    Args:
      paths: the corpus files.
      directory: of the shards; it must hold none.
      per_shard: conversations in a shard.

    Returns:
      Conversations and tokens written.

    Raises:
      ConfigError: a corpus is not there, or the directory has shards already.
    """
    _check_there(paths)
    if shard_paths(directory):
        raise ConfigError(f"{directory} holds shards already; give data.pack a directory of its own")
    seen: set[tuple[int, ...]] = set()
    kept = []
    in_order = (sorted(read_conversations(path), key=lambda conversation: conversation.index) for path in paths)
    for conversation in itertools.chain.from_iterable(in_order):
        # Two answers to one message are two texts; only the whole conversation can be a repetition.
        if conversation.tokens not in seen and len(conversation.tokens) > conversation.prompt_len:
            seen.add(conversation.tokens)
            kept.append(TokenSequence(np.array(conversation.tokens, np.int32), conversation.prompt_len))
    append_shards(directory, kept, per_shard)
    return len(kept), sum(len(sequence.tokens) for sequence in kept)


class _Writer:
    """Conversations in flight."""

    def __init__(self, engine: Engine, config: CorpusConfig):
        assert engine.tokenizer is not None
        self._engine, self._config, self._tokenizer = engine, config, engine.tokenizer
        self._starters = _read_lines(config.starters) if config.starters else [""]
        self._prompts = [json.loads(line) for line in _read_lines(config.prompts)] if config.prompts else None
        self._material = self._read_material(config.material, config.requests) if config.requests else None
        # The template's text around a user message, up to where the message stands.
        marker = "\N{BLACK SQUARE}message\N{BLACK SQUARE}"
        self._opening = self._tokenizer.chat_text([{"role": "user", "content": marker}]).split(marker)[0]
        self._questions: dict[str, str] = {}
        self._prompt_of: dict[str, tuple[int, ...]] = {}

    def ask(self, index: int) -> None:
        """Starts conversation `index`."""
        if self._prompts is not None:
            prompt = self._prompts[index % len(self._prompts)]
            self._answer(index, prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}])
            return
        if self._material is not None:
            self._answer(index, self._material.messages(random.Random(f"{self._config.seed}/request/{index}")))
            return
        starter = random.Random(f"{self._config.seed}/starter/{index}").choice(self._starters)
        self._questions[f"{index}/question"] = starter
        self._engine.add_request(
            self._engine.tokenize(self._opening + starter),
            {
                "temperature": self._config.question_temperature,
                "min_p": self._config.question_min_p,
                "max_tokens": self._config.question_tokens,
                "seed": self._seed(index, "question"),
            },
            request_id=f"{index}/question",
        )

    def step(self) -> Iterator[Conversation]:
        """Runs the engine once; questions that are complete are answered, answers that are complete yielded."""
        for update in self._engine.step():
            completion = update.completion
            if completion is None:
                continue
            index, turn = update.id.split("/")
            if turn == "question":
                text = (self._questions.pop(update.id) + (completion.text or "")).strip()
                # A message cut off by the length limit would train on prompts nobody writes.
                if completion.finish_reason == "stop" and text:
                    self._questions[f"{index}/answer"] = text
                    self._answer(int(index), [{"role": "user", "content": text}])
                continue
            prompt = self._prompt_of.pop(update.id)
            yield Conversation(
                index=int(index),
                question=self._questions.pop(update.id, ""),
                temperature=self._temperature(int(index)),
                prompt_len=len(prompt),
                tokens=prompt + completion.token_ids,
            )

    def _answer(self, index: int, messages: Sequence[dict[str, Any]]) -> None:
        request_id = f"{index}/answer"
        prompt = self._engine.tokenize(messages)
        try:
            self._engine.add_request(
                prompt,
                {
                    "temperature": self._temperature(index),
                    "max_tokens": self._config.answer_tokens,
                    "seed": self._seed(index, "answer"),
                },
                request_id=request_id,
            )
        except RequestError:
            # Too long for the engine: nothing to learn from a prompt without an answer.
            self._questions.pop(request_id, None)
            return
        self._prompt_of[request_id] = prompt

    def _read_material(self, corpora: Sequence[str], requests: str) -> Material:
        _check_there(corpora)
        said = itertools.chain.from_iterable(map(read_conversations, corpora))
        answers = ((one.question, self._tokenizer.decode(one.tokens[one.prompt_len :])) for one in said)
        return Material(itertools.starmap(Exchange.of, answers), _read_lines(requests))

    def _temperature(self, index: int) -> float:
        return self._config.answer_temperatures[index % len(self._config.answer_temperatures)]

    def _seed(self, index: int, turn: str) -> int:
        return random.Random(f"{self._config.seed}/{turn}/{index}").getrandbits(32)


def _check_there(corpora: Sequence[str | Path]) -> None:
    for path in corpora:
        if not Path(path).exists():
            raise ConfigError(f"there is no corpus at {path}; `dflash-jax data generate` writes one")


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _repair(path: Path) -> set[int]:
    """Cuts a torn last line off a corpus file and returns the conversations it has."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return {conversation.index for conversation in read_conversations(path)}
