"""Sequences in files: shards of ArrayRecord, one record a sequence.

A record is little-endian int32: the number of prompt tokens, then the tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from grain.sources import ArrayRecordDataSource
from jaxtyping import Int

from dflash_jax.errors import ConfigError
from dflash_jax.writing import replacing

_SUFFIX = ".arrayrecord"


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """A text as tokens. The first `prompt_len` are the prompt; the target wrote the others."""

    tokens: Int[np.ndarray, " tokens"]
    prompt_len: int


def encode_record(sequence: TokenSequence) -> bytes:
    """The bytes of a record."""
    return np.concatenate([[sequence.prompt_len], sequence.tokens]).astype("<i4").tobytes()


def decode_record(record: bytes) -> TokenSequence:
    """The sequence of a record.

    Raises:
      ValueError: it is no sequence; the message says why.
    """
    if not record or len(record) % 4:
        raise ValueError(f"{len(record)} bytes, which are no int32 numbers")
    numbers = np.frombuffer(record, "<i4")
    sequence = TokenSequence(numbers[1:].astype(np.int32), int(numbers[0]))
    _check(sequence)
    return sequence


def _check(sequence: TokenSequence) -> None:
    tokens, prompt_len = np.asarray(sequence.tokens), sequence.prompt_len
    if not 0 <= prompt_len <= len(tokens):
        raise ValueError(f"a prompt of {prompt_len} tokens in a sequence of {len(tokens)}")
    if len(tokens) and not (tokens.dtype.kind in "iu" and 0 <= tokens.min() <= tokens.max() < 2**31):
        raise ValueError("tokens that are no integers of 0 to 2**31 - 1")


def write_shard(directory: str | Path, index: int, sequences: Iterable[TokenSequence]) -> Path:
    """Writes one shard; it appears under its name only when complete.

    Args:
      directory: where to; made if it is not there.
      index: number of the shard.
      sequences: what it holds.

    Raises:
      ConfigError: one of them is no sequence.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{index:05d}{_SUFFIX}"
    with replacing(path) as scratch:
        # Groups of one: records are read one at a time, in random order.
        writer = ArrayRecordWriter(str(scratch), "group_size:1")
        for number, sequence in enumerate(sequences):
            try:
                _check(sequence)
            except ValueError as error:
                raise ConfigError(f"sequence {number} for the shard {path} has {error}") from None
            writer.write(encode_record(sequence))
        writer.close()
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
    first = max((int(path.stem) for path in shard_paths(directory) if path.stem.isdecimal()), default=-1) + 1
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
      ConfigError: there are none, or a shard is damaged; reading a sequence raises it too.
    """

    def __init__(self, directory: str | Path):
        self._paths = shard_paths(directory)
        if not self._paths:
            raise ConfigError(
                f"there are no *{_SUFFIX} files in {directory}; `dflash-jax data pack` writes them, "
                "and data.path must name their directory"
            )
        # One reader a shard, to tell which one is damaged.
        self._shards = [_open_shard(path) for path in self._paths]
        self._ends = list(itertools.accumulate(map(len, self._shards)))
        if not len(self):
            raise ConfigError(f"the *{_SUFFIX} files in {directory} hold no sequence; write them again")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sequence {index} among {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        shard = self._shards[number]
        place = index - self._ends[number] + len(shard)
        try:
            return decode_record(shard[place])
        except (RuntimeError, ValueError, IndexError) as error:
            raise _damaged(self._paths[number], error, f"record {place}: ") from None


def _open_shard(path: Path) -> ArrayRecordDataSource:
    try:
        return ArrayRecordDataSource([str(path)])
    except (RuntimeError, ValueError, IndexError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception, where: str = "") -> ConfigError:
    reason = str(error).partition("\n")[0] or "it is incomplete"
    return ConfigError(f"the shard {path} is damaged ({where}{reason}); restore it, or write it again")
