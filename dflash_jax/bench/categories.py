"""Acceptance by category: questions are answered, and each category is counted by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dflash_jax.acceptance import Acceptance, total_acceptance
from dflash_jax.bench.config import SweepConfig
from dflash_jax.bench.questions import Question
from dflash_jax.compiling import CompileWatch
from dflash_jax.engine import Completion, Engine, Prompt, SamplingParams
from dflash_jax.errors import RequestError
from dflash_jax.jobs.positions import Positions, positions_of
from dflash_jax.jobs.summary import versions

_AHEAD = 2
"""Requests handed to the engine, in multiples of its slots."""


@dataclasses.dataclass
class Tally:
    """What came of the questions of a category, one way.

    Attributes:
      answers: how many turns were answered.
      failed: how many were not: too long for the engine, ended by an error, or after such a turn.
      tokens: that were produced.
      seconds: that it took, compilation not counted.
    """

    answers: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    positions: Positions = dataclasses.field(default_factory=Positions)

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))

    def figures(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "answers": self.answers,
            "failed": self.failed,
            "output_tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens / self.seconds, 3) if self.seconds else None,
            **self.acceptance.counts(),
            **self.acceptance.ratios(digits=6),
            "acceptance_by_position": {**self.positions.counts(), "rate": self.positions.rates()},
        }


def run_questions(
    config: SweepConfig,
    questions: Sequence[Question],
    *,
    plain: bool = False,
    note: Callable[[str], None] = lambda text: None,
    on_category: Callable[[int], object] = lambda done: None,
    load: Callable[..., Engine] = Engine.from_config,
) -> dict[str, Any]:
    """Answers questions, category after category, and counts each by itself.

    A tokenizer with a chat template gets each turn as a message of the user, after the model's answers to those before;
    without one it gets the text, and all that was said before it.

    Args:
      config: the models, the engine, and how to sample.
      questions: in any order.
      plain: answer each category without drafting, too, and tell the speed-up; every second one first.
      note: called with a line of progress.
      on_category: called with how many categories are done.
      load: makes the engine of a setup and a clock.

    Returns:
      Plain values: what was run; `categories`, by name; `overall`, of all rounds alike; and `mean_of_categories`, the
      mean acceptance length in which every category counts the same.

    Raises:
      ConfigError, CheckpointError: it cannot be run.
    """
    with CompileWatch() as watch:
        note(f"loading {config.target.path} and {config.draft.path}")
        engine = load(config.setup, clock=watch.clock)
        by_name: dict[str, list[Question]] = {}
        for question in questions:
            by_name.setdefault(question.category, []).append(question)
        tallies: dict[str, dict[bool, Tally]] = {}
        for number, (name, asked) in enumerate(by_name.items()):
            ways = ((True, False) if number % 2 else (False, True)) if plain else (True,)
            note(f"{name}: {len(asked)} questions")
            tallies[name] = {way: _ask(engine, asked, config.defaults, way, watch) for way in ways}
            on_category(number + 1)
        categories = {name: _figures(tally, len(by_name[name])) for name, tally in tallies.items()}
        overall = {way: sum((t[way] for t in tallies.values()), Tally()) for way in next(iter(tallies.values()))}
        lengths = [c["mean_acceptance_length"] for c in categories.values() if c["mean_acceptance_length"] is not None]
        return {
            "target": config.target.path,
            "draft": config.draft.path,
            "k": engine.k,
            "max_slots": engine.config.max_slots,
            "temperature": config.defaults.temperature,
            "max_tokens": config.defaults.max_tokens,
            "categories": categories,
            "overall": _figures(overall, len(questions)),
            "mean_of_categories": round(sum(lengths) / len(lengths), 6) if lengths else None,
            "compilation": watch.figures(),
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
        }


def _figures(tally: dict[bool, Tally], questions: int) -> dict[str, Any]:
    found = {"questions": questions, **tally[True].figures()}
    if False in tally:
        found["plain_tokens_per_s"] = tally[False].figures()["tokens_per_s"]
        both = found["tokens_per_s"], found["plain_tokens_per_s"]
        found["speedup"] = round(both[0] / both[1], 4) if all(both) else None
    return found


def _ask(
    engine: Engine, questions: Sequence[Question], sampling: SamplingParams, drafted: bool, watch: CompileWatch
) -> Tally:
    """Answers all turns of questions, a question's next turn as soon as the one before is answered."""
    sampling = dataclasses.replace(sampling, speculation=drafted)
    tally, begin = Tally(), watch.clock()
    waiting = [_Talk(question, engine) for question in reversed(questions)]
    running: dict[str, _Talk] = {}
    while waiting or running:
        while waiting and len(running) < _AHEAD * engine.config.max_slots:
            talk = waiting.pop()
            try:
                running[engine.add_request(talk.prompt(), sampling)] = talk
            except RequestError:
                tally.failed += talk.left
        for update in engine.step() if running else ():
            if update.completion is None:
                continue
            talk = running.pop(update.id)
            _count(tally, update.completion, talk)
            if update.completion.finish_reason != "error" and talk.answered(update.completion):
                waiting.append(talk)
    tally.seconds = watch.clock() - begin
    return tally


def _count(tally: Tally, completion: Completion, talk: _Talk) -> None:
    if completion.finish_reason == "error":
        tally.failed += talk.left
        return
    tally.answers += 1
    tally.tokens += len(completion.token_ids)
    tally.acceptance += total_acceptance([completion.metrics])
    tally.positions += positions_of(completion)


class _Talk:
    """A question, and what was said so far."""

    def __init__(self, question: Question, engine: Engine):
        self._turns, self._said = question.turns, [question.turns[0]]
        self._chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template

    @property
    def left(self) -> int:
        """Turns that are not answered."""
        return len(self._turns) - len(self._said) // 2

    def prompt(self) -> Prompt:
        """What the model is given."""
        if not self._chat:
            return "\n\n".join(self._said)
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": text} for n, text in enumerate(self._said)]

    def answered(self, completion: Completion) -> bool:
        """Takes the answer down, and returns whether there is another turn."""
        self._said.append(completion.text or "")
        if not self.left:
            return False
        self._said.append(self._turns[len(self._said) // 2])
        return True
