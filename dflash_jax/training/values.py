"""The kinds of values in the configs of training, with their types and ranges.

Types are strict: "62", 62.0 and true are no integers. Ranges end where no run makes sense, so that nothing is sized
by a value before it is checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict

from dflash_jax.settings import Section

Dtype = Literal["float32", "bfloat16"]

Positive = Annotated[int, Field(gt=0, lt=2**31)]
"""A number of steps, of sequences, or of something else that takes no memory by itself."""

Size = Annotated[int, Field(gt=0, le=2**20)]
"""A size of an array, in tokens, channels or entries."""

Layers = Annotated[int, Field(gt=0, le=1024)]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]

Seed = Annotated[int, Field(ge=0, lt=2**32)]

Fraction = Annotated[float, Field(ge=0, le=1)]

Scale = Annotated[float, Field(ge=1e-30, le=1e30)]
"""A positive number, inside the range of float32."""

Weight = Annotated[float, Field(ge=0, le=1e30)]

# YAML has lists and no tuples.
LayerIds = Annotated[tuple[Annotated[int, Field(ge=0, lt=1024)], ...], Strict(False), Field(min_length=1)]
Windows = Annotated[tuple[Positive | None, ...], Strict(False), Field(min_length=1, max_length=1024)]


class StrictSection(Section):
    """A section whose values must have the very types that they are declared with."""

    model_config = ConfigDict(strict=True)


def _check_path(path: str) -> str:
    if not path:
        raise ValueError("it must name a file or directory")
    if "\0" in path:
        raise ValueError("a path has no NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("a path has no half of a surrogate pair") from None
    return os.path.expanduser(path)


def _text(value: Any) -> Any:
    """A path given from Python, as text."""
    return str(value) if isinstance(value, Path) else value


def _source(value: Any) -> Any:
    return value["path"] if isinstance(value, Mapping) and set(value) == {"path"} else value


def _directory(value: Any) -> Any:
    return Path(_check_path(value)) if isinstance(value, str) else value


PathText = Annotated[str, BeforeValidator(_text), AfterValidator(_check_path)]
Source = Annotated[str, AfterValidator(_check_path), BeforeValidator(_source)]
Directory = Annotated[Path, BeforeValidator(_directory)]
