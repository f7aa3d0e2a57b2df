"""Safetensors files: one or several, read tensor by tensor and written in shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax.errors import CheckpointError
from dflash_jax.families.leaf import HostArray, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What the weights of a model we can run come as; anything else is a quantisation this package lacks.
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


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
        handle = safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors ({error}); it may be incomplete") from error
    tensors = {}
    for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
        view = handle.get_slice(name)

        def load(slices: tuple[slice, ...], name=name, view=view) -> HostArray:
            if view.get_dtype() not in _FLOAT_DTYPES:
                raise CheckpointError(
                    f"tensor {name!r} in {file} is of dtype {view.get_dtype()}, "
                    f"but weights must be one of {', '.join(_FLOAT_DTYPES)}"
                )
            return view[slices] if slices else handle.get_tensor(name)

        tensors[name] = StoredTensor(name, file, tuple(view.get_shape()), view.get_dtype(), load)
    return tensors


def _open_sharded(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: it must be JSON with a 'weight_map'") from error
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            raise CheckpointError(f"{index} names the shard {shard!r}, which is missing from {directory}")
        shards[shard] = open_file(directory / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(f"tensor {name!r} is missing from {directory / shard}, where {index} says it is")
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


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
