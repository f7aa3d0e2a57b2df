"""`tokenizer_config.json`: the fields that are used, checked before transformers and chat templates meet them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.errors import CheckpointError
from dflash_jax.schema import Schema, check


def _token(value: Any) -> Any:
    if value is None or isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str)):
        return value
    raise ValueError("it must be a string, or an object whose 'content' is one")


def _template(value: Any) -> Any:
    if isinstance(value, list):
        for one in value:
            if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("name", "template")):
                raise ValueError("each template in a list must be an object with 'name' and 'template'")
    elif value is not None and not isinstance(value, str):
        raise ValueError("it must be a string, or a list of named templates")
    return value


_Token = Annotated[Any, AfterValidator(_token)]


class _TokenizerFields(Schema):
    bos_token: _Token = None
    eos_token: _Token = None
    unk_token: _Token = None
    pad_token: _Token = None
    chat_template: Annotated[Any, AfterValidator(_template)] = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    tokenizer_class: str | None = None
    model_max_length: Annotated[float, Field(ge=0)] | None = None


def check_tokenizer_config(directory: Path) -> None:
    """Raises CheckpointError if a directory's `tokenizer_config.json` is there and has a field that it cannot have."""
    file = directory / "tokenizer_config.json"
    if file.exists():
        check(_TokenizerFields, read_object(file), str(file), error=CheckpointError)
