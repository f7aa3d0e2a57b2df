"""Text for training, written by the target itself through the engine.

Each conversation is made in two turns of the target. It first writes the user's message: the chat
template is opened at the user's turn, with a few words to start from, and the target goes on. Then it
answers that message, at a temperature it will be drafted at. Conversation i depends only on the seed
and i, so an interrupted run continues where it stopped and gives the same text.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from dflash_jax.checkpoints import load_target
from dflash_jax.engine import Engine, EngineConfig, Models
from dflash_jax.engine.config import TargetSource
from dflash_jax.engine.engine import Prompt
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.files import sole_writer
from dflash_jax.settings import Section
from dflash_jax.training.claims import difference, flatten, read_claim, write_claim
from dflash_jax.training.config import Dtype, Fraction, Positive, Seed
from dflash_jax.training.conversations import Conversation, read_conversations, repair
from dflash_jax.training.material import Material
from dflash_jax.training.precision import rounded
from dflash_jax.training.questions import read_lines, read_prompts

Temperature = Annotated[float, Field(ge=0)]


class CorpusConfig(Section):
    """What `dflash-jax data generate` does.

    Attributes:
      target: who writes.
      engine: how it runs.
      dtype: of the factors of its matrix products.
      output: JSONL file to append conversations to.
      conversations: how many to have in the end.
      starters: text file with one beginning of a user message per line; an empty line starts from nothing.
      prompts: JSONL file like a job's input, to answer instead of letting the target ask.
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
    question_temperature: Temperature = 1.0
    question_min_p: Fraction = 0.05
    question_tokens: Positive = 64
    answer_temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0, 0.0, 0.5)
    answer_tokens: Positive = 224
    seed: Seed = 0

    @field_validator("output")
    @classmethod
    def _plain(cls, output: str) -> str:
        if output.endswith(".gz"):
            raise ValueError("conversations are written as plain text; give a name without .gz, and pack it afterwards")
        return output

    @model_validator(mode="after")
    def _one_source(self) -> CorpusConfig:
        if bool(self.material) != (self.requests is not None):
            raise ValueError("`material` and `requests` belong together: corpora, and what to ask about their texts")
        given = [name for name in ("starters", "prompts", "requests") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say what to ask; keep one of them")
        return self


def writing_engine(config: CorpusConfig) -> Engine:
    """The engine that writes a corpus.

    Raises:
      ConfigError, CheckpointError: the target cannot be loaded.
    """
    target = load_target(config.target.path, config.engine.dtype)
    models = Models(rounded(target.params, config.dtype), target.config)
    return Engine(models, config.engine, tokenizer=config.target.spoken_to(target.tokenizer))


def generate_corpus(
    engine: Engine, config: CorpusConfig, on_dropped: Callable[[str], None] = lambda reason: None
) -> Iterator[Conversation]:
    """Writes the conversations that the output file lacks, yielding each as it is written.

    Args:
      engine: with the target and its tokenizer.
      config: what to write.
      on_dropped: is told the reason for each conversation that does not come about.

    Raises:
      ConfigError: the target has no chat template, a file named in the config cannot be used, the output is another
        process's or was written with other settings, or nothing could be written.
    """
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        raise ConfigError(f"target.path {config.target.path!r} has no chat template, so it cannot ask or answer")
    writer = _Writer(engine, config, on_dropped)
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with sole_writer(output, f"the corpus {output}"), output.open("a", encoding="utf-8") as file:
        done = repair(output)
        _claim(output, config, begun=bool(done))
        pending = iter(index for index in range(config.conversations) if index not in done)
        found = bool(done)
        while True:
            while _wants_more(engine) and (index := next(pending, None)) is not None:
                writer.ask(index)
            if not engine.has_work:
                break
            for conversation in writer.step():
                file.write(conversation.to_json() + "\n")
                file.flush()
                found = True
                yield conversation
    if not found:
        raise ConfigError(f"no conversation came about for {output}: {writer.first_dropped}")


def _wants_more(engine: Engine) -> bool:
    return len(engine.host.waiting) < max(1, engine.config.max_slots // 2)


def _claim(output: Path, config: CorpusConfig, begun: bool) -> None:
    """Records beside a corpus what its text depends on, or refuses to go on with other text."""
    file, settings = output.with_name(f"{output.name}.json"), _settings(config)
    if begun and file.exists() and (changed := difference(read_claim(file), settings)):
        raise ConfigError(f"{output} was written with other settings ({changed}); give another output")
    write_claim(file, settings)


def _settings(config: CorpusConfig) -> dict[str, object]:
    """All that the text of a conversation depends on; of a file, what is in it."""
    fields = config.model_dump(mode="json", exclude={"output", "conversations", "engine"})
    if config.prompts is not None or config.requests is not None:
        fields = {name: value for name, value in fields.items() if not name.startswith("question_")}
    for name in ("starters", "prompts", "requests"):
        if fields[name] is not None:
            fields[name] = _content(fields[name])
    fields["material"] = [_content(path) for path in fields["material"]]
    return {**flatten(fields), "engine.dtype": config.engine.dtype}


def _content(path: str) -> str:
    data = Path(path).read_bytes()
    return f"{len(data)} bytes with SHA-256 {hashlib.sha256(data).hexdigest()}"


class _Writer:
    """Conversations in flight.

    Attributes:
      first_dropped: why the first conversation did not come about that did not.
    """

    def __init__(self, engine: Engine, config: CorpusConfig, on_dropped: Callable[[str], None]):
        assert engine.tokenizer is not None
        self._engine, self._config, self._tokenizer = engine, config, engine.tokenizer
        self._on_dropped, self.first_dropped = on_dropped, ""
        self._starters = [""] if config.starters is None else read_lines(config.starters, "starters")
        self._prompts = None if config.prompts is None else read_prompts(config.prompts)
        self._material = None if config.requests is None else self._read_material(config.material, config.requests)
        # The template's text around a user message, up to where the message stands.
        marker = "\N{BLACK SQUARE}message\N{BLACK SQUARE}"
        self._opening = self._tokenizer.chat_text([{"role": "user", "content": marker}]).split(marker)[0]
        self._questions: dict[str, str] = {}
        self._prompt_of: dict[str, tuple[int, ...]] = {}

    def ask(self, index: int) -> None:
        """Starts conversation `index`."""
        if self._prompts is not None:
            self._answer(index, self._prompts[index % len(self._prompts)])
            return
        if self._material is not None:
            self._answer(index, self._material.messages(random.Random(f"{self._config.seed}/request/{index}")))
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
        """Runs the engine once; questions that are complete are answered, answers that are complete yielded."""
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

    def _read_material(self, corpora: Sequence[str], requests: str) -> Material:
        said = itertools.chain.from_iterable(map(read_conversations, corpora))
        answers = ((one.question, self._tokenizer.decode(one.tokens[one.prompt_len :])) for one in said)
        return Material(answers, read_lines(requests, "requests"))

    def _temperature(self, index: int) -> float:
        return self._config.answer_temperatures[index % len(self._config.answer_temperatures)]

    def _seed(self, request_id: str) -> int:
        index, turn = request_id.split("/")
        return random.Random(f"{self._config.seed}/{turn}/{index}").getrandbits(32)
