"""Corpus files: a conversation a line, in JSON."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from dflash_jax.errors import ConfigError
from dflash_jax.settings import fault

Count = Annotated[int, Field(ge=0)]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One example: `tokens` begin with a prompt of `prompt_len` tokens, and the target wrote the rest."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    index: Count
    question: str
    temperature: Annotated[float, Field(ge=0)]
    prompt_len: Count
    tokens: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]

    def to_json(self) -> str:
        """One line of the corpus file."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


_FORMAT = TypeAdapter(Conversation)
_BEGINNING = b'{"index"'


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Conversations of a corpus file, which may be gzipped. A last line that was cut off is left out.

    Raises:
      ConfigError: the file cannot be read, or a line is no conversation.
    """
    number = 0
    try:
        with _open(Path(path)) as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _conversation(line, f"{path} line {number}")
    except FileNotFoundError:
        raise ConfigError(f"there is no corpus at {path}; `dflash-jax data generate` writes one") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the corpus {path} cannot be read after line {number} ({reason}); mend it, or leave it out"
        ) from None


def repair(path: Path) -> set[int]:
    """Removes a last line that was cut off from a corpus file.

    Returns:
      The indices of the conversations in it.

    Raises:
      ConfigError: it is no corpus; the file is not changed.
    """
    found = {conversation.index for conversation in read_conversations(path)}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    torn = data[whole:]
    # Some file systems leave zeros after a crash.
    if not torn.startswith(_BEGINNING[: len(torn)]) and torn.strip(b"\0"):
        raise ConfigError(f"{path} ends in what is no conversation, so it is no corpus; give another output")
    if torn:
        os.truncate(path, whole)
    return found


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _conversation(line: bytes, where: str) -> Conversation:
    try:
        conversation = _FORMAT.validate_json(line)
    except ValidationError as error:
        raise ConfigError(f"{where} is no conversation ({fault(error)}); mend it, or remove it") from None
    if conversation.prompt_len > len(conversation.tokens):
        raise ConfigError(
            f"{where} is no conversation (a prompt of {conversation.prompt_len} tokens, but only "
            f"{len(conversation.tokens)} tokens in all); mend it, or remove it"
        )
    return conversation
