"""GGUF files: metadata and dequantised tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from dflash_jax.errors import CheckpointError
from dflash_jax.families.leaf import HostArray, StoredTensor

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def open_gguf(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """A file's metadata by key, and its tensors by GGUF name, dequantised when read.

    Raises:
      CheckpointError: not a GGUF file, or a broken one.
    """
    try:
        reader = gguf.GGUFReader(file)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {file}") from None
    except Exception as error:  # the reader raises whatever parsing garbage leads to
        raise CheckpointError(f"{file} cannot be read as GGUF ({error}); it may be incomplete") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return metadata, {tensor.name: _stored(tensor, file) for tensor in reader.tensors}


def _stored(tensor: gguf.ReaderTensor, file: Path) -> StoredTensor:
    kind = tensor.tensor_type.name

    def load(slices: tuple[slice, ...]) -> HostArray:
        if kind not in SUPPORTED:
            raise CheckpointError(
                f"tensor {tensor.name!r} in {file} is quantised as {kind}, but it must be one of {', '.join(SUPPORTED)}"
            )
        # Quantisation runs along the last axis, so leading ones can be cut before it is undone.
        return gguf.quants.dequantize(tensor.data[slices], tensor.tensor_type)

    shape = tuple(int(size) for size in reversed(tensor.shape))
    return StoredTensor(tensor.name, file, shape, kind, load)
