"""Corpus files: a conversation a line, in JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from dflash_jax.errors import ConfigError
from dflash_jax.settings import fault
from dflash_jax.streams import open_stream

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
_LONGEST = 1 << 26
"""Bytes of a line; one of a million tokens has a tenth of it."""
_BEGINNING = b'{"index"'


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Conversations of a corpus file, which may be gzipped. A last line that was cut off is left out.

    Raises:
      ConfigError: the file cannot be read, or a line is no conversation.
    """
    number = 0
    try:
        with _open(Path(path)) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
                if len(line) == _LONGEST:
                    raise ConfigError(
                        f"{path} line {number} is no conversation (it has more than {_LONGEST >> 20} MiB); "
                        "mend it, or remove it"
                    )
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
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST))
        end = file.read()
    torn = end[end.rfind(b"\n") + 1 :]
    # Some file systems leave zeros after a crash.
    if not torn.startswith(_BEGINNING[: len(torn)]) and torn.strip(b"\0"):
        raise ConfigError(f"{path} ends in what is no conversation, so it is no corpus; give another output")
    if torn:
        os.truncate(path, size - len(torn))
    return found


@contextlib.contextmanager
def _open(path: Path) -> Iterator[gzip.GzipFile | BinaryIO]:
    with open_stream(path) as file:
        if path.suffix == ".gz":
            with gzip.open(file) as unpacked:
                yield unpacked
        else:
            yield file


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
