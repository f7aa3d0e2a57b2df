"""Which command a config is for, so that a config given to the wrong command is refused with the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.errors import ConfigError

Kind = Literal["job", "training", "corpus"]

COMMANDS: dict[Kind, str] = {"job": "generate", "training": "train", "corpus": "data generate"}

KEYS: dict[Kind, frozenset[str]] = {
    "job": frozenset(["target", "draft", "engine", "sampling", "input", "output", "report"]),
    "training": frozenset(
        [
            "target",
            "pretrain",
            "output",
            "seed",
            "dtype",
            "log_every",
            "tensorboard",
            "draft",
            "init",
            "data",
            "loss",
            "optimiser",
            "checkpoint",
            "evaluation",
        ]
    ),
    "corpus": frozenset(
        [
            "target",
            "engine",
            "dtype",
            "output",
            "conversations",
            "starters",
            "prompts",
            "source_corpora",
            "instructions",
            "question_temperature",
            "question_min_p",
            "question_tokens",
            "answer_temperatures",
            "answer_tokens",
            "seed",
        ]
    ),
}
"""The keys at the top of each kind of config; here, so that a command need not import the others' code."""


def check_kind(values: Mapping[str, Any], kind: Kind, source: str) -> None:
    """Refuses a config that is evidently of another kind.

    Args:
      values: the config.
      kind: what it should be.
      source: what to call it in the error.

    Raises:
      ConfigError: more of its keys are another kind's than this one's; the message names that kind's command.
    """
    strange = {each: [name for name in values if name not in keys] for each, keys in KEYS.items()}
    # A key that no kind has does not make it another's.
    nearest = min(KEYS, key=lambda each: (len(strange[each]), each != kind))
    if nearest != kind:
        telling = next(name for name in strange[kind] if name not in strange[nearest])
        raise ConfigError(
            f"{source} is a {nearest} config (it has {telling!r}); run it with `dflash-jax {COMMANDS[nearest]}`"
        )
