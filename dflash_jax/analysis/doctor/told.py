"""What is told about a draft beside its weights: its config, its card, and the run that trained it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from dflash_jax.checkpoints.load import read_draft_config
from dflash_jax.errors import DflashError
from dflash_jax.models.config import DraftConfig
from dflash_jax.training.run.log import read_metrics

_THINKING = re.compile(r"enable_thinking\W{1,4}(true|false)", re.IGNORECASE)
_NOT_THINKING = re.compile(
    r"\bnon-?\s?thinking\b|\bwithout thinking\b|\bthinking (?:mode )?(?:is )?(?:off|disabled)\b", re.I
)

_MOST_CARD = 1 << 20


@dataclasses.dataclass(frozen=True)
class Told:
    """What files say about a draft; None where they do not.

    Attributes:
      config: of its `config.json`, without what a job's config has in its place.
      dtype: that its weights were stored in, or trained for.
      max_positions: the longest context it was made for.
      thinking: whether it is for answers with thinking, by its card.
      target_fingerprint: of the target it was trained for.
      trained_tokens: the longest text it was trained on.
      trained_acceptance: mean acceptance length on held-out text at the end of training, teacher forced.
      tokenizer: the vocabulary in its tokenizer.json, if it comes with one.
    """

    config: DraftConfig | None = None
    dtype: str | None = None
    max_positions: int | None = None
    thinking: bool | None = None
    target_fingerprint: str | None = None
    trained_tokens: int | None = None
    trained_acceptance: float | None = None
    tokenizer: dict[str, int] | None = None


def read_told(source: str | Path) -> Told:
    """What is told in a draft's directory, and in that of the run that wrote it there.

    What cannot be read is taken for not told: a doctor that fails on a broken card is of no use.
    """
    source = Path(source)
    fields = _json(source / "config.json")
    run = _json(source / "run.json") or _json(source.parent / "run.json")
    try:
        config = read_draft_config(source)
    except DflashError:
        config = None
    return Told(
        config=config,
        dtype=_text(fields.get("dtype") or fields.get("torch_dtype")),
        max_positions=_number(fields.get("max_position_embeddings")),
        thinking=_thinking(source, fields),
        target_fingerprint=_text(run.get("target fingerprint")),
        trained_tokens=_number(run.get("data.max_length")),
        trained_acceptance=_trained_acceptance(source.parent / "metrics.jsonl"),
        tokenizer=read_vocabulary(source),
    )


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """Pieces and ids of a `tokenizer.json`; None if there is none."""
    file = _json(directory / "tokenizer.json")
    vocabulary = file.get("model", {}).get("vocab") if isinstance(file.get("model"), dict) else None
    if not isinstance(vocabulary, dict):
        return None
    added = file.get("added_tokens")
    pieces = {one["content"]: one["id"] for one in added if "content" in one} if isinstance(added, list) else {}
    return {**vocabulary, **pieces}


def _thinking(source: Path, fields: dict[str, Any]) -> bool | None:
    nested = fields.get("dflash_config")
    for place in (nested if isinstance(nested, dict) else {}, fields):
        kwargs = place.get("chat_template_kwargs")
        found = kwargs.get("enable_thinking") if isinstance(kwargs, dict) else place.get("enable_thinking")
        if isinstance(found, bool):
            return found
    try:
        with (source / "README.md").open(encoding="utf-8", errors="replace") as file:
            card = file.read(_MOST_CARD)
    except OSError:
        return None
    said = {match.lower() == "true" for match in _THINKING.findall(card)}
    if len(said) == 1:
        return said.pop()
    return False if not said and _NOT_THINKING.search(card) else None


def _trained_acceptance(metrics: Path) -> float | None:
    if not metrics.is_file():
        return None
    lines = read_metrics(metrics, "held_out")
    found = lines[-1].get("acceptance") if lines else None
    return float(found) if isinstance(found, int | float) else None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
