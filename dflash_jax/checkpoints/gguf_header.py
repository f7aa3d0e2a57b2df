"""The header of a GGUF file: its metadata, and where the bytes of each tensor lie.

The `gguf` package's own reader trusts the counts and sizes in a file, so that a damaged one makes it hang or take
all memory. Here each of them is compared with the file's length before memory is allocated for it.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dflash_jax.errors import CheckpointError, quote

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
# A vocabulary of 256,000 tokens with its scores, types and merges takes 2 million values and 20 MB.
_MAX_VALUES = 1 << 23
_MAX_BYTES = 1 << 28

_Type = gguf.GGUFValueType
_SCALARS: dict[gguf.GGUFValueType, np.dtype[Any]] = {
    _Type.UINT8: np.dtype("<u1"),
    _Type.INT8: np.dtype("<i1"),
    _Type.UINT16: np.dtype("<u2"),
    _Type.INT16: np.dtype("<i2"),
    _Type.UINT32: np.dtype("<u4"),
    _Type.INT32: np.dtype("<i4"),
    _Type.UINT64: np.dtype("<u8"),
    _Type.INT64: np.dtype("<i8"),
    _Type.FLOAT32: np.dtype("<f4"),
    _Type.FLOAT64: np.dtype("<f8"),
    _Type.BOOL: np.dtype("<u1"),
}
# The fewest bytes a key with its value, a tensor's entry, and a string can take.
_LEAST_PAIR, _LEAST_TENSOR, _LEAST_STRING = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8, 8


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """What a header says of a tensor.

    Attributes:
      name: its name.
      kind: its dtype or quantisation.
      shape: its shape, outermost axis first.
      start: its first byte in the file.
      row_bytes: bytes of one row of its last axis.
    """

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in bytes: the last axis as it is stored."""
        return (*self.shape[:-1], self.row_bytes)

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + math.prod(self.stored_shape)


@dataclasses.dataclass(frozen=True)
class Header:
    """What stands before the weights of a GGUF file: its metadata by key, and its tensors in order."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]


def read_header(file: Path) -> Header:
    """Reads a GGUF file's header.

    Raises:
      CheckpointError: no such file, not a GGUF file, or one whose header cannot be right; it says which field.
    """
    if not file.exists():
        raise CheckpointError(f"there is no file {file}")
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file, as a GGUF file must be")
    try:
        with file.open("rb") as handle:
            size = handle.seek(0, 2)
            if size < len(_MAGIC) + 4 + 8 + 8:
                raise CheckpointError(f"{file} cannot be read as GGUF: it has {size} bytes, fewer than any header")
            with mmap.mmap(handle.fileno(), min(size, _MAX_BYTES), access=mmap.ACCESS_READ) as data:
                return _Reader(data, size, file).header()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None


class _Reader:
    """Reads a header from its first byte to its last.

    Args:
      data: the file's beginning.
      size: of the whole file.
      file: for messages.
    """

    def __init__(self, data: mmap.mmap, size: int, file: Path):
        self._data, self._size, self._file = data, size, file
        self._at = self._values = 0

    def header(self) -> Header:
        if self._take(4, "its magic") != _MAGIC:
            raise self._fault("it does not begin with the letters GGUF")
        version = self._integer("<I", "its version")
        if version not in _VERSIONS:
            kind = "written for big-endian machines or damaged" if version & 0xFFFF == 0 else f"of version {version}"
            raise self._fault(f"it is {kind}, but must be little-endian and of version 2 or 3")
        tensors, pairs = (self._integer("<Q", f"the count of {name}") for name in ("tensors", "metadata keys"))
        self._expect(pairs, _LEAST_PAIR, "metadata keys")
        metadata: dict[str, Any] = {}
        for number in range(pairs):
            key = self._string(f"metadata key {number + 1} of {pairs}")
            if key in metadata:
                raise self._fault(f"the metadata key {quote(key)} is there twice")
            metadata[key] = self._value(key)
        self._expect(tensors, _LEAST_TENSOR, "tensors")
        found = [self._tensor(f"tensor {number + 1} of {tensors}") for number in range(tensors)]
        return Header(metadata, tuple(self._placed(found, self._alignment(metadata))))

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file} cannot be read as GGUF: {what}")

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            raise self._fault(
                f"{what} takes {count} bytes from byte {self._at} on, but the file has {self._size}; "
                "it is damaged or incomplete"
            )
        if self._at + count > _MAX_BYTES:
            raise self._fault(f"its header has more than {_MAX_BYTES} bytes at {what}, more than any model's")
        self._at += count
        return self._data[self._at - count : self._at]

    def _integer(self, layout: str, what: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout), what))[0])

    def _string(self, what: str) -> str:
        length = self._integer("<Q", f"the length of {what}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._fault(f"{what} is not UTF-8 ({error.reason} at its byte {error.start})") from None

    def _strings(self, count: int, what: str) -> list[str]:
        """An array of strings: a vocabulary has a hundred thousand, so that each must cost little."""
        length_of, data, end = struct.Struct("<Q").unpack_from, self._data, min(self._size, _MAX_BYTES)
        found: list[str] = []
        at = self._at
        for number in range(count):
            start = at + 8
            stop = start + length_of(data, at)[0] if start <= end else end + 1
            try:
                if stop > end:
                    raise ValueError
                found.append(data[start:stop].decode())
            except ValueError:
                # Read it again the slow way, which says what is wrong.
                self._at = at
                found.append(self._string(f"element {number} of {what}"))
                stop = self._at
            at = stop
        self._at = at
        return found

    def _expect(self, count: int, least: int, what: str) -> None:
        """Refuses a count of things that have no room in what is left of the file."""
        room = (self._size - self._at) // least
        if count > room:
            raise self._fault(
                f"it counts {count} {what}, but the {self._size - self._at} bytes that are left hold {room} at most"
            )
        self._values += count
        if self._values > _MAX_VALUES:
            raise self._fault(f"its header has over {_MAX_VALUES} values with the {what}, more than any model's")

    def _kind(self, what: str) -> gguf.GGUFValueType:
        number = self._integer("<I", f"the type of {what}")
        try:
            return _Type(number)
        except ValueError:
            raise self._fault(f"{what} has the unknown type {number}") from None

    def _value(self, key: str) -> Any:
        what = f"the metadata key {quote(key)}"
        kind = self._kind(what)
        if kind == _Type.STRING:
            return self._string(what)
        if kind != _Type.ARRAY:
            return self._scalars(kind, 1, what)[0]
        inner = self._kind(f"the elements of {what}")
        if inner == _Type.ARRAY:
            raise self._fault(f"{what} is an array of arrays, which no model's metadata needs")
        count = self._integer("<Q", f"the length of {what}")
        least = _LEAST_STRING if inner == _Type.STRING else _SCALARS[inner].itemsize
        self._expect(count, least, f"elements of {what}")
        if inner == _Type.STRING:
            return self._strings(count, what)
        return self._scalars(inner, count, what)

    def _scalars(self, kind: gguf.GGUFValueType, count: int, what: str) -> list[Any]:
        dtype = _SCALARS[kind]
        values = np.frombuffer(self._take(count * dtype.itemsize, what), dtype)
        if kind != _Type.BOOL:
            return values.tolist()
        if np.any(values > 1):
            raise self._fault(f"{what} is a truth value of {values.max()}, but it must be 0 or 1")
        return values.astype(bool).tolist()

    def _tensor(self, which: str) -> TensorEntry:
        """A tensor's entry, with its start counted from where the weights begin."""
        name = self._string(f"the name of {which}")
        what = f"tensor {quote(name)}"
        axes = self._integer("<I", f"the number of axes of {what}")
        if not 1 <= axes <= _MAX_DIMENSIONS:
            raise self._fault(f"{what} has {axes} axes, but it must have 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([self._integer("<Q", f"the shape of {what}") for _ in range(axes)]))
        if 0 in shape:
            raise self._fault(f"{what} has shape {list(shape)}, but every axis must be at least 1")
        number = self._integer("<I", f"the type of {what}")
        start = self._integer("<Q", f"the offset of {what}")
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._fault(f"{what} has the unknown quantisation {number}") from None
        if shape[-1] % block:
            raise self._fault(
                f"{what} has rows of {shape[-1]} values, but {kind.name} must have a multiple of {block} in each"
            )
        return TensorEntry(name, kind, shape, start, shape[-1] // block * block_bytes)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._fault(
                f"general.alignment is {quote(alignment)}, but it must be a power of two of at most {1 << 20}"
            )
        return alignment

    def _placed(self, tensors: list[TensorEntry], alignment: int) -> Iterator[TensorEntry]:
        """The tensors with their starts counted from the file's first byte; each has bytes of its own in the file."""
        first = -(-self._at // alignment) * alignment
        seen: set[str] = set()
        for tensor in tensors:
            if tensor.name in seen:
                raise self._fault(f"tensor {quote(tensor.name)} is there twice")
            if tensor.start % alignment:
                raise self._fault(
                    f"tensor {quote(tensor.name)} begins at offset {tensor.start}, "
                    f"but it must be a multiple of general.alignment ({alignment})"
                )
            seen.add(tensor.name)
        placed = [dataclasses.replace(tensor, start=first + tensor.start) for tensor in tensors]
        reached, before = first, ""
        for tensor in sorted(placed, key=lambda tensor: tensor.start):
            if tensor.start < reached:
                raise self._fault(f"tensors {quote(before)} and {quote(tensor.name)} lie on the same bytes")
            if tensor.end > self._size:
                raise self._fault(
                    f"tensor {quote(tensor.name)} of shape {list(tensor.shape)} ends at byte {tensor.end}, "
                    f"but the file has {self._size}; it is damaged or incomplete"
                )
            reached, before = tensor.end, tensor.name
        return iter(placed)
