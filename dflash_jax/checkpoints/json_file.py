"""JSON files of checkpoints, read within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_jax.errors import CheckpointError, quote, reason

# An index of 100,000 tensors has some 10 MB; a tokenizer, which is not read here, may have more.
_MAX_BYTES = 1 << 26


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
      CheckpointError: no such file, or not JSON: too large, nested too deep, or with numbers too long, too.
    """
    try:
        if not file.exists():
            raise CheckpointError(f"{file} is missing; there must be such a JSON file")
        # A pipe or a device would be read for ever.
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file, as a checkpoint's JSON must be")
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, but JSON may have {_MAX_BYTES} at most")
        return json.loads(file.read_bytes().decode())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    except RecursionError:
        raise CheckpointError(f"{file} is not valid JSON: it is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({reason(error)})") from None


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file's object. Raises CheckpointError if there is none."""
    fields = read_json(file)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} holds {quote(fields)}, but it must be a JSON object")
    return fields
