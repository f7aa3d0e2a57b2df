"""The config of a batch generation job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from dflash_jax.engine.config import EngineSetup, scaling_fields
from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.kinds import check_kind
from dflash_jax.settings import PathText, Section, describe_source, parse, read_settings
from dflash_jax.streams import STDIN


class InputFile(Section):
    """Where the prompts are: JSON lines, in a file, packed or not, or from a pipe."""

    path: PathText


class OutputFile(Section):
    """Where the answers go: JSON lines.

    Attributes:
      path: the file; a rerun adds only what is missing from it.
      trace: write what each round produced and drafted.
      checkpoint_every: seconds between snapshots of the engine, from which a job that was killed continues in
        the middle of its requests; none are taken by default.
    """

    path: PathText
    trace: bool = False
    checkpoint_every: float | None = Field(default=None, gt=0)


class ReportConfig(Section):
    """What is reported at the end of the job.

    Attributes:
      samples: how many of the answers are printed.
      compare_plain: run some of the prompts again with and without drafting, and tell the speed-up.
      compare_requests: how many.
      compare_tokens: tokens of each of their answers, at most; null leaves it to their `max_tokens`.
    """

    samples: int = Field(default=3, ge=0)
    compare_plain: bool = False
    compare_requests: int = Field(default=4, ge=1)
    compare_tokens: int | None = Field(default=64, ge=1)


class JobConfig(EngineSetup):
    """A job: the models and engine, how to sample, what to read and where to write.

    Relative paths are relative to the current directory, as everywhere on a command line.
    """

    sampling: dict[str, Any] = Field(default_factory=dict)
    input: InputFile
    output: OutputFile
    report: ReportConfig = ReportConfig()

    @property
    def defaults(self) -> SamplingParams:
        """How a request samples unless its line says otherwise."""
        return SamplingParams().override(self.sampling)

    @property
    def setup(self) -> EngineSetup:
        """What its engine is made of."""
        return EngineSetup(target=self.target, draft=self.draft, engine=self.engine)

    def identity(self) -> dict[str, Any]:
        """The settings that shape the answers; results made under different ones do not belong in one file."""
        return {
            **{
                f"target.{name}": getattr(self.target, name)
                for name in ("path", "revision", "file", "weights", "chat_template", "chat_template_kwargs")
            },
            "target.rope_scaling": scaling_fields(self.target.rope_scaling),
            **{
                f"draft.{name}": getattr(self.draft, name, None)
                for name in ("path", "revision", "file", "weights", "k", "mask_token_id", "max_context", "shortlist")
            },
            "draft.rope_scaling": scaling_fields(self.draft.rope_scaling) if self.draft else None,
            "engine.max_model_len": self.engine.max_model_len,
            "engine.dtype": self.engine.dtype,
            **{f"sampling.{name}": _plain(value) for name, value in vars(self.defaults).items()},
        }


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job from a YAML file.

    Args:
      path: the file.
      overrides: texts `a.b=value` that win over it.

    Raises:
      ConfigError: it cannot be read, or a key is unknown, missing or has a bad value.
    """
    source = describe_source(path, overrides)
    values = read_settings(path, overrides)
    check_kind(values, "job", source)
    config = parse(JobConfig, values, source)
    try:
        _ = config.defaults
    except RequestError as error:
        raise ConfigError(f"{source}: {error}") from None
    if str(path) == STDIN and config.input.path in (STDIN, "/dev/stdin"):
        raise ConfigError("the config and input.path are both the standard input; give one of them a file")
    if config.report.compare_plain and config.draft is None:
        raise ConfigError(f"{source}: report.compare_plain needs a draft to compare with plain decoding")
    return config


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
