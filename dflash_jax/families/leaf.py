"""One array of a model: what checkpoints call it, and the tensor that a checkpoint has for it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

_log = logging.getLogger(__name__)

# One tensor, or a part of one, on the host.
HostArray = Float[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the params.

    Attributes:
      name: its Hugging Face tensor name; of stacked experts, with `{expert}` for the number.
      shape: shape of the tensor (of one expert's tensor) in the checkpoint.
      transposed: the params hold the transpose, as of every torch Linear ([out, in] there).
      experts: how many tensors are stacked on a leading axis; 0 for a plain tensor.
      looked_up: its rows are looked up, by token; it may be the LM head too.
      path: where it stands in the params, attributes and layer numbers joined by dots; `table` knows it.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    experts: int = 0
    looked_up: bool = False
    path: str = ""

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a Linear that activations are multiplied by; experts are multiplied in groups."""
        return self.transposed and not self.experts

    @property
    def may_be_compact(self) -> bool:
        """Whether the params may hold it as a checkpoint has it; see `kernels.compact`."""
        return self.is_matrix or self.looked_up

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor the array is made of."""
        if not self.experts:
            return (self.name,)
        return tuple(self.name.format(expert=expert) for expert in range(self.experts))

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Shape of the array in the params."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return (self.experts, *shape) if self.experts else shape

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.param_shape)


def leaf(name: str, *shape: int, transposed: bool = False, experts: int = 0, looked_up: bool = False) -> Any:
    """A `Leaf`, to stand where the params have the array."""
    return Leaf(name, shape, transposed, experts, looked_up)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A matrix as a checkpoint stores it, for `kernels.compact`.

    Attributes:
      format: its name in `kernels.compact.FORMATS`.
      codes: [outputs, size].
      scales: [outputs, groups], for formats that have them.
      group: inputs that share a scale.
    """

    format: str
    codes: np.ndarray
    scales: Float[np.ndarray, "outputs groups"] | None = None
    group: int = 0

    def with_rows(self, rows: Int[np.ndarray, " chosen"]) -> Stored:
        """Some rows, in the order given."""
        scales = None if self.scales is None else self.scales[rows]
        return dataclasses.replace(self, codes=self.codes[rows], scales=scales)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
      name: its name in the file.
      file: the file it is in.
      shape: its shape.
      dtype: its dtype or quantisation, as the format spells it.
      load: reads the part that the slices select, all of it if there are none.
      stored: reads it as it is stored, where that is a matrix that `kernels.compact` has; None elsewhere.
      stored_bytes: what it takes so.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[tuple[slice, ...]], HostArray]
    stored: Callable[[], Stored] | None = None
    stored_bytes: int = 0

    def read(self, *slices: slice) -> HostArray:
        """The tensor, or the part that slices of its leading axes select."""
        return self.load(slices)


def changed(
    tensor: StoredTensor, change: Callable[[HostArray], HostArray], shape: tuple[int, ...] | None = None
) -> StoredTensor:
    """A tensor that is another one changed: computed when it is read; of the same shape, if none is given."""

    def load(slices: tuple[slice, ...]) -> HostArray:
        return change(tensor.read())[slices]

    return StoredTensor(tensor.name, tensor.file, tensor.shape if shape is None else shape, tensor.dtype, load)


def with_rows(tensor: StoredTensor, rows: Int[np.ndarray, " chosen"]) -> StoredTensor:
    """Some rows of a tensor, in the order given; as it is stored too, since each row is stored by itself."""
    whole = tensor.stored
    return dataclasses.replace(
        changed(tensor, lambda array: array[rows], (len(rows), *tensor.shape[1:])),
        stored=None if whole is None else lambda: whole().with_rows(rows),
        stored_bytes=tensor.stored_bytes // max(tensor.shape[0], 1) * len(rows),
    )


Tensors = Mapping[str, StoredTensor]
"""The tensors of a checkpoint by name."""


def leave_out(tensors: Tensors, parts: Mapping[str, str]) -> dict[str, StoredTensor]:
    """The tensors without those of parts that this package does not run; a log line says which are left out.

    Args:
      tensors: by name.
      parts: beginnings of tensor names, each with what that part is called.
    """
    left = {prefix: [t for name, t in tensors.items() if name.startswith(prefix)] for prefix in parts}
    found = [prefix for prefix in parts if left[prefix]]
    if found:
        what = " and ".join(dict.fromkeys(parts[prefix] for prefix in found))
        _log.warning("%s: %s left out, which this package does not run", left[found[0]][0].file, what)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(parts))}
