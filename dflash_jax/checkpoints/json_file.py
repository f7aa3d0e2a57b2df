"""JSON files of checkpoints, which anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_jax.errors import CheckpointError, quote

# A config.json has a few thousand bytes; Python's objects take up to twenty times the file.
_LONGEST = 16 * 2**20


def read_object(file: Path, *, longest: int = _LONGEST) -> dict[str, Any]:
    """A JSON file's object; arguments and errors as of `read_json`, and CheckpointError if it holds anything else."""
    fields = read_json(file, longest=longest)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} holds {quote(fields, 40)}, but it must hold a JSON object")
    return fields


def read_json(file: Path, *, longest: int = _LONGEST) -> Any:
    """What a JSON file holds.

    Args:
      file: the file.
      longest: bytes it may have.

    Raises:
      CheckpointError: there is no such file, it is larger, or it is not JSON.
    """
    try:
        if not file.exists():
            raise CheckpointError(f"{file} is missing; there must be such a JSON file")
        # A pipe or a device might never end.
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file, but it must be a JSON file")
        if file.stat().st_size > longest:
            raise CheckpointError(f"{file} has {file.stat().st_size:,} bytes, but it must have at most {longest:,}")
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unambiguous)
    except RecursionError:
        raise CheckpointError(f"{file} is not valid JSON (its values are nested too deeply)") from None
    except ValueError as error:
        # Python's own reason, for an integer of thousands of digits, goes on with advice for programmers.
        reason = str(error).partition(";")[0]
        raise CheckpointError(f"{file} is not valid JSON ({reason})") from None


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        for name, value in pairs:
            if repr(fields[name]) != repr(value):
                raise ValueError(f"the key {quote(name)} is given twice, with different values")
    return fields
