"""Fields of files from elsewhere, checked before memory is allocated by them.

A `Schema` names the fields that are used, with their types and ranges. Types are strict: "62", 62.0 and 1 are no
integer, and true is no number, but an integer may stand where a number is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dflash_jax.errors import ConfigError, DflashError, quote

_Schema = TypeVar("_Schema", bound="Schema")

_PHRASES = {
    "int_type": "an integer",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
    "too_long": "a list of at most {max_length}",
}

Layers = Annotated[int, Field(ge=1, le=1024)]
"""Layers of a model. A thousand is eight times the deepest published ones."""
LayerIndex = Annotated[int, Field(ge=0, lt=1024)]
"""A layer, 0-based."""
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Channels of a hidden state or of an MLP."""
Heads = Annotated[int, Field(ge=1, le=4096)]
"""Attention heads, and channels of one."""
VocabSize = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens in a vocabulary."""
Positions = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Tokens in a context; positions are 32-bit integers."""
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]
"""What is added to a variance."""
Scale = Annotated[float, Field(gt=0.0, le=1e9)]
"""A factor."""
Names = Annotated[list[str], Field(fail_fast=True)]
"""Strings. Of a list the first wrong entry is told; a million of them would be no help."""


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


TokenIds = Annotated[tuple[int, ...], Field(fail_fast=True), BeforeValidator(_listed)]
"""Token ids: one, a list of them, or null for none. Whether the vocabulary has them is for the reader to say."""


class Schema(BaseModel):
    """The fields of a file that are used; others may be there."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def check(
    model: type[_Schema],
    values: Mapping[str, Any],
    source: str,
    *,
    error: type[DflashError] = ConfigError,
    label: Callable[[str], str] = str,
) -> _Schema:
    """Values as a schema's fields.

    Args:
      model: the schema.
      values: as read from a file.
      source: what to call the file in errors.
      error: what to raise.
      label: a top-level field's name as the file spells it.

    Raises:
      DflashError: of the class `error`: a field is missing, or has a value that it cannot have.
    """
    try:
        return model.model_validate(values)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        top, *inside = first["loc"] or ("it",)
        place = label(str(top)) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)
        if first["type"] == "missing":
            raise error(f"{place} is missing from {source}") from None
        if first["type"] == "value_error":
            reason = str(first["ctx"]["error"])
        else:
            bounds = first.get("ctx", {}).items()
            phrase = _PHRASES.get(first["type"], "something else: {message}")
            shown = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in bounds}
            reason = f"it must be {phrase.format(**shown, message=first['msg'])}"
        raise error(f"{place} in {source} is {quote(first['input'])}, but {reason}") from None
