"""The `quantization_config` of a checkpoint, checked against what can be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.errors import CheckpointError, quote
from dflash_jax.families.leaf import StoredTensor

Tensors = Mapping[str, StoredTensor]


class Settings:
    """The `quantization_config` of a file; refuses what is not among the choices."""

    def __init__(self, values: Mapping[str, Any], file: Path):
        self._values, self._file = values, file

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where there is none."""
        value = self._values.get(key)
        return default if value is None else value

    def fault(self, key: str, value: Any, right: str) -> CheckpointError:
        """The error of a value that is none of those that can be read."""
        return CheckpointError(
            f"quantization_config.{key} in {self._file} is {quote(value)}, but only {right} can be read"
        )

    def choose(self, key: str, choices: tuple[Any, ...], default: Any) -> Any:
        """The value of a key, which must be one of the choices, in small letters."""
        value = self.get(key, default)
        folded = value.lower() if isinstance(value, str) else value
        if not any(type(folded) is type(choice) and folded == choice for choice in choices):
            raise self.fault(key, value, " or ".join(map(repr, choices)))
        return folded

    def group_size(self) -> int:
        """Inputs that share a scale; -1 if all do."""
        size = self.get("group_size", 128)
        if type(size) is not int or (size != -1 and size < 1):
            raise self.fault("group_size", size, "a positive integer, or -1 for one group")
        return size

    def block(self, key: str, value: Any) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None if the value says nothing."""
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(side) is int and side > 0 for side in value):
            raise self.fault(key, value, "two positive integers")
        return value[0], value[1]


def misfit(tensor: StoredTensor, what: str) -> CheckpointError:
    """The error of a tensor that is not as its quantisation lays it out."""
    return CheckpointError(
        f"tensor {quote(tensor.name)} in {tensor.file} {what}; its quantization_config or the file must be another's"
    )
