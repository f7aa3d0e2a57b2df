"""The config of a corpus: the YAML of `dflash-jax data generate`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict, field_validator, model_validator

from dflash_jax.engine import EngineConfig
from dflash_jax.engine.config import TargetSource
from dflash_jax.training.values import Dtype, Fraction, PathText, Positive, Seed, StrictSection

Temperature = Annotated[float, Field(ge=0, le=1e12)]


class CorpusConfig(StrictSection):
    """What `dflash-jax data generate` does.

    Attributes:
      target: the model that writes.
      engine: how it runs.
      dtype: of the factors of its matrix products.
      output: JSONL file to append conversations to.
      conversations: how many the file has in the end.
      starters: text file with the beginning of a user message on each line, which the target completes; an empty
        line lets it write the whole message.
      prompts: JSONL file like a job's input, to answer instead.
      instructions, source_corpora: text file with an instruction on each line, and the corpora whose answers they
        are about (`corpora.instructions`), to answer instead.
      question_temperature, question_min_p, question_tokens: how user messages are sampled.
      answer_temperatures: each answer takes one of these, in equal shares.
      answer_tokens: longest answer.
      seed: of everything random.
    """

    target: TargetSource
    engine: EngineConfig = EngineConfig(max_slots=32, max_model_len=384, prefill_chunk=256, rounds_per_step=4)
    dtype: Dtype = "float32"
    output: PathText
    conversations: Positive
    starters: PathText | None = None
    prompts: PathText | None = None
    instructions: PathText | None = None
    source_corpora: Annotated[tuple[PathText, ...], Strict(False)] = ()
    question_temperature: Temperature = 1.0
    question_min_p: Fraction = 0.05
    question_tokens: Positive = 64
    answer_temperatures: Annotated[tuple[Temperature, ...], Strict(False), Field(min_length=1)] = (0.0, 0.0, 0.5)
    answer_tokens: Positive = 224
    seed: Seed = 0

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: str) -> str:
        if output.endswith(".gz"):
            raise ValueError("conversations are written as plain text; give a name without .gz, and pack it afterwards")
        return output

    @model_validator(mode="after")
    def _check_sources(self) -> CorpusConfig:
        if bool(self.source_corpora) != (self.instructions is not None):
            raise ValueError("`instructions` and `source_corpora` belong together: what to ask, and about what")
        given = [name for name in ("starters", "prompts", "instructions") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say what to ask; keep one of them")
        return self
