"""Sequences in files: shards of ArrayRecord, one record a sequence.

A record is little-endian int32: the number of prompt tokens, then the tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from grain.sources import ArrayRecordDataSource
from jaxtyping import Int

from dflash_jax.errors import ConfigError

_SUFFIX = ".arrayrecord"


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """A text, and how much of it was the prompt: the target wrote the tokens after `prompt_len`."""

    tokens: Int[np.ndarray, " tokens"]
    prompt_len: int


def encode_record(sequence: TokenSequence) -> bytes:
    """The bytes of a record."""
    return np.concatenate([[sequence.prompt_len], sequence.tokens]).astype("<i4").tobytes()


def decode_record(record: bytes) -> TokenSequence:
    """The sequence of a record."""
    numbers = np.frombuffer(record, "<i4")
    return TokenSequence(numbers[1:].astype(np.int32), int(numbers[0]))


def write_shard(directory: str | Path, index: int, sequences: Iterable[TokenSequence]) -> Path:
    """Writes one shard; it appears under its name only when complete.

    Args:
      directory: where to; made if it is not there.
      index: number of the shard.
      sequences: what it holds.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{index:05d}{_SUFFIX}"
    partial = path.with_suffix(".partial")
    # Groups of one: records are read one at a time, in random order.
    writer = ArrayRecordWriter(str(partial), "group_size:1")
    for sequence in sequences:
        writer.write(encode_record(sequence))
    writer.close()
    os.replace(partial, path)
    return path


def append_shards(directory: str | Path, sequences: Iterable[TokenSequence], per_shard: int = 1000) -> list[Path]:
    """Writes sequences as new shards after those that are there.

    Args:
      directory: where to; made if it is not there.
      sequences: what to add.
      per_shard: sequences of a shard; the last one may have fewer.

    Returns:
      The new shards.
    """
    existing = shard_paths(directory)
    first = int(existing[-1].stem) + 1 if existing else 0
    remaining = iter(sequences)
    # itertools.batched is newer than the oldest Python that is supported.
    batches = iter(lambda: list(itertools.islice(remaining, per_shard)), [])
    return [write_shard(directory, first + number, batch) for number, batch in enumerate(batches)]


def shard_paths(directory: str | Path) -> list[Path]:
    """The complete shards of a directory, in order."""
    return sorted(Path(directory).glob(f"*{_SUFFIX}"))


class SequenceSource(Sequence[TokenSequence]):
    """All sequences of a directory, by number, as a source for grain.

    Raises:
      ConfigError: there are none.
    """

    def __init__(self, directory: str | Path):
        paths = shard_paths(directory)
        if not paths:
            raise ConfigError(
                f"there are no *{_SUFFIX} files in {directory}; `dflash-jax data generate` writes them, "
                "and data.path must name their directory"
            )
        self._records = ArrayRecordDataSource([str(path) for path in paths])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):
        return decode_record(self._records[index])
