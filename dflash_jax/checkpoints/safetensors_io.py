"""Safetensors files: one or several, read tensor by tensor and written in shards."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax.checkpoints.json_file import read_object
from dflash_jax.errors import CheckpointError, quote, reason
from dflash_jax.families.leaf import HostArray, Stored, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Each of some 100,000 tensors with its file takes 100 bytes.
_LONGEST_INDEX = 1 << 26

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def open_directory(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory with `model.safetensors`, or with shards and their index.

    Only headers are read; each tensor's bytes when it is asked for.

    Raises:
      CheckpointError: no such file, a shard missing or broken, or a tensor that is not where the index says.
    """
    if (directory / SINGLE).is_file():
        return open_file(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}, one of which must hold the weights")
    return _open_sharded(directory)


def open_file(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file."""
    try:
        # The library holds every size in the header against the file; it cannot read 8-bit floats into numpy.
        with safe_open(file, framework="numpy"), file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({reason(error)}); it may be incomplete"
        ) from error
    header.pop("__metadata__", None)
    return {name: _stored(name, entry, file, 8 + length) for name, entry in header.items()}


def _stored(name: str, entry: dict, file: Path, first: int) -> StoredTensor:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]

    def load(slices: tuple[slice, ...]) -> HostArray:
        if dtype not in _DTYPES:
            raise CheckpointError(f"tensor {quote(name)} in {file} is of dtype {dtype}, which cannot be read")
        if start == end:
            return np.empty(shape, _DTYPES[dtype])[slices]
        data = np.memmap(file, mode="r", offset=first + start, shape=(end - start,))
        return np.asarray(data).view(_DTYPES[dtype]).reshape(shape)[slices]

    if dtype not in ("F16", "BF16") or len(shape) != 2:
        return StoredTensor(name, file, shape, dtype, load)
    return StoredTensor(name, file, shape, dtype, load, lambda: Stored(dtype, load(())), end - start)


def _open_sharded(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX
    weight_map = read_object(index, longest=_LONGEST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} is not a safetensors index: it must have a 'weight_map' from tensors to files, "
            f"not {quote(weight_map)}"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise CheckpointError(
                f"weight_map in {index} has {quote(shard)} for tensor {quote(name)}, "
                "but it must be the name of a file in the same directory"
            )
    shards = {}
    for shard in sorted(set(weight_map.values())):
        # Unlike Path.is_file, False for a name that is too long, too.
        if not os.path.isfile(directory / shard):
            raise CheckpointError(f"{index} names the shard {quote(shard)}, which is missing from {directory}")
        shards[shard] = open_file(directory / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(f"tensor {quote(name)} is missing from {directory / shard}, where {index} says it is")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards.values():
        for name, tensor in shard.items():
            if name in tensors:
                raise CheckpointError(f"tensor {quote(name)} is both in {tensors[name].file} and in {tensor.file}")
            tensors[name] = tensor
    return tensors


def write_directory(
    directory: Path, tensors: Iterable[tuple[str, Callable[[], HostArray], int]], max_shard_bytes: int
) -> None:
    """Writes tensors as `model.safetensors`, or as shards with an index where they exceed one.

    Args:
      directory: an existing directory.
      tensors: name, maker and bytes of each; made only when its shard is written.
      max_shard_bytes: size to keep each file under; a larger tensor gets a file of its own.
    """
    shards: list[dict[str, Callable[[], HostArray]]] = [{}]
    total = filled = 0
    for name, make, size in tensors:
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = make
        filled += size
        total += size
    if len(shards) == 1:
        _write_file(directory / SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_file(file: Path, makers: dict[str, Callable[[], HostArray]]) -> None:
    # transformers refuses files whose metadata does not name a framework's layout.
    save_file({name: make() for name, make in makers.items()}, file, metadata={"format": "pt"})
