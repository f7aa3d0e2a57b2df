"""The config of a sweep: models and engine, from a config of its own or a job's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from dflash_jax.engine.config import DraftSource, EngineSetup
from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError, RequestError, quote
from dflash_jax.jobs.config import InputFile
from dflash_jax.kinds import check_kind
from dflash_jax.settings import describe_source, parse, read_settings

_MOST = 1 << 16
"""Slots of an engine, as its config allows."""


class SweepConfig(EngineSetup):
    """A config with a draft. Of a job's, `input` may give the prompts; `output` and `report` are passed over.

    Attributes:
      sampling: how the requests sample; the sweep itself sets when they end.
    """

    draft: DraftSource
    sampling: dict[str, Any] = Field(default_factory=dict)
    input: InputFile | None = None
    output: Any = None
    report: Any = None

    @property
    def defaults(self) -> SamplingParams:
        """How a request samples."""
        return SamplingParams().override(self.sampling)

    @property
    def setup(self) -> EngineSetup:
        """What the engine is made of."""
        return EngineSetup(target=self.target, draft=self.draft, engine=self.engine)

    def with_slots(self, slots: int) -> EngineSetup:
        """The engine of a level: a pool that fits its slots, no prefix cache, and requests that fail one by one."""
        sizes = {"max_slots": slots, "num_pages": None, "prefix_cache": False, "strict": False}
        return EngineSetup(target=self.target, draft=self.draft, engine=self.engine.model_copy(update=sizes))


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Reads a sweep's config from a YAML file.

    Args:
      path: the file.
      overrides: texts `a.b=value` that win over it.

    Raises:
      ConfigError: it cannot be read, has no draft, or a key is unknown, missing or has a bad value.
    """
    source = describe_source(path, overrides)
    values = read_settings(path, overrides)
    check_kind(values, "job", source)
    if values.get("draft") is None:
        raise ConfigError(f"{source}: a sweep compares decoding with and without a draft, and there is no 'draft'")
    config = parse(SweepConfig, values, source)
    try:
        sampling = config.defaults
    except RequestError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not sampling.speculation:
        raise ConfigError(f"{source}: sampling.speculation is false; a sweep measures it on and off by itself")
    return config


def parse_levels(text: str) -> tuple[int, ...]:
    """The levels of `1,2,4`.

    Raises:
      ConfigError: it is no list of positive integers.
    """
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1 or max(levels) > _MOST:
        raise ConfigError(f"--concurrency is {quote(text)}; it must be positive integers such as 1,2,4,8")
    return levels
