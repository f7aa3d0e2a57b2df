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
      path: where it stands in the params, attributes and layer numbers joined by dots; `table` knows it.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    experts: int = 0
    path: str = ""

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a Linear that activations are multiplied by; experts are multiplied in groups."""
        return self.transposed and not self.experts

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


def leaf(name: str, *shape: int, transposed: bool = False, experts: int = 0) -> Any:
    """A `Leaf`, to stand where the params have the array."""
    return Leaf(name, shape, transposed, experts)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
      name: its name in the file.
      file: the file it is in.
      shape: its shape.
      dtype: its dtype or quantisation, as the format spells it.
      load: reads the part that the slices select, all of it if there are none.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[tuple[slice, ...]], HostArray]

    def read(self, *slices: slice) -> HostArray:
        """The tensor, or the part that slices of its leading axes select."""
        return self.load(slices)


def changed(
    tensor: StoredTensor, change: Callable[[HostArray], HostArray], shape: tuple[int, ...] | None = None
) -> StoredTensor:
    """A tensor that is another one changed: computed when it is read; of the same shape, if none is given."""

    def load(slices: tuple[slice, ...]) -> HostArray:
        return change(tensor.read())[slices]

    return dataclasses.replace(tensor, shape=tensor.shape if shape is None else shape, load=load)


def with_rows(tensor: StoredTensor, rows: Int[np.ndarray, " chosen"]) -> StoredTensor:
    """Some rows of a tensor, in the order given."""
    return changed(tensor, lambda array: array[rows], (len(rows), *tensor.shape[1:]))


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
