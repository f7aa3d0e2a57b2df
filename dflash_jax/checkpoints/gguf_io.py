"""GGUF files: metadata, and tensors as they are stored or dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dflash_jax.checkpoints.gguf_header import TensorEntry
from dflash_jax.checkpoints.gguf_parts import read_parts
from dflash_jax.errors import CheckpointError, quote
from dflash_jax.families.leaf import HostArray, Stored, StoredTensor
from dflash_jax.kernels.compact import FORMATS

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def open_gguf(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """A model's metadata by key, and its tensors by GGUF name.

    Args:
      file: the only file, or any part of a model that is split into several.

    Raises:
      CheckpointError: not a GGUF file, a damaged one, or parts that do not make a whole.
    """
    headers = read_parts(file)
    tensors = {
        entry.name: _stored(entry, part, np.memmap(part, mode="r"))
        for part, header in headers.items()
        for entry in header.tensors
    }
    return next(iter(headers.values())).metadata, tensors


def _stored(entry: TensorEntry, file: Path, data: np.memmap) -> StoredTensor:
    kind = entry.kind.name

    def load(slices: tuple[slice, ...]) -> HostArray:
        if kind not in SUPPORTED:
            raise CheckpointError(
                f"tensor {quote(entry.name)} in {file} is quantised as {kind}, "
                f"but it must be one of {', '.join(SUPPORTED)}"
            )
        # Quantisation runs along the last axis, so leading ones can be cut before it is undone.
        part = np.asarray(data[entry.start : entry.end]).reshape(entry.stored_shape)[slices]
        with np.errstate(all="ignore"):  # a scale that is not finite is told as a weight that is not
            return gguf.quants.dequantize(part, entry.kind)

    def stored() -> Stored:
        rows = np.asarray(data[entry.start : entry.end]).reshape(entry.stored_shape)
        return Stored(kind, rows.view(FORMATS[kind].dtype_of_codes))

    compact = kind in FORMATS and len(entry.shape) == 2
    if not compact:
        return StoredTensor(entry.name, file, entry.shape, kind, load)
    return StoredTensor(entry.name, file, entry.shape, kind, load, stored, entry.end - entry.start)
