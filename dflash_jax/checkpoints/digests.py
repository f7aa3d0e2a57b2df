"""What tells a file that is whole from one that was cut or changed: its size and SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

Digest = dict[str, Any]


def digest(file: Path) -> Digest:
    """A file's size and hash, as JSON can hold them."""
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256")
        return {"bytes": handle.tell(), "sha256": found.hexdigest()}


def is_whole(file: Path, expected: Any) -> bool:
    """Whether a file has the digest that was noted when it was written."""
    try:
        if not file.is_file() or not isinstance(expected, dict):
            return False
        # A file that was cut need not be read.
        return file.stat().st_size == expected.get("bytes") and digest(file) == expected
    except OSError:
        return False
