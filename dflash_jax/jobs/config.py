"""The config of a batch generation job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from dflash_jax.engine.config import EngineSetup, scaling_fields
from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.jobs.formats import InputFormat, OutputFormat
from dflash_jax.jobs.template import Template, check_template
from dflash_jax.kinds import check_kind
from dflash_jax.settings import PathText, Section, describe_source, parse, read_settings
from dflash_jax.streams import STDIN

Column = Literal[
    "id",
    "prompt",
    "messages",
    "prompt_token_ids",
    "tools",
    "chat_template_kwargs",
    "continue_final_message",
    "sampling",
]
"""A key of a line, which an input may call otherwise."""

KEYS: tuple[Column, ...] = get_args(Column)


def _check_template(template: Template | None) -> Template | None:
    return None if template is None else check_template(template)


class InputFile(Section):
    """Where the prompts are, and how rows become prompts.

    Attributes:
      path: a file, packed or not, a pipe, or the directory of a table.
      format: "jsonl", "openai" or "table"; by default it is known by the first bytes.
      columns: what the input calls the keys of a line, such as `{prompt: text, id: uid}`.
      template: text with names of columns in braces, which becomes the prompt; or a list of messages with such text.
      split: which split of a dataset on disk.
    """

    path: PathText
    format: InputFormat | None = None
    columns: dict[Column, str] = Field(default_factory=dict)
    template: Annotated[str | list[dict[str, str]] | None, AfterValidator(_check_template)] = None
    split: str | None = None


class OutputFile(Section):
    """Where the answers go.

    Attributes:
      path: the file, or for Parquet the directory; a rerun adds only what is missing from it.
      format: "jsonl", "openai" or "parquet"; by default Parquet if the path ends so, OpenAI's if the input is, and
        otherwise JSON lines.
      row_group: rows of each Parquet file.
      trace: write what each round produced and drafted.
      checkpoint_every: seconds between snapshots of the engine, from which a job that was killed continues in
        the middle of its requests; none are taken by default.
    """

    path: PathText
    format: OutputFormat | None = None
    row_group: int = Field(default=10_000, ge=1, le=1 << 20)
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
            "input.columns": dict(self.input.columns),
            "input.template": self.input.template,
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
