"""What a directory was made from, in a JSON file in it, and whether that is what is asked for now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections of settings as one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def write_claim(file: Path, settings: Mapping[str, Any]) -> None:
    """Records settings, which must be plain JSON values."""
    file.write_text(json.dumps(dict(settings), indent=2) + "\n")


def difference(file: Path, settings: Mapping[str, Any]) -> str | None:
    """How settings differ from those recorded in a file, as a clause; None if they are the same."""
    recorded = json.loads(file.read_text())
    changed = sorted(name for name in {*settings, *recorded} if settings.get(name) != recorded.get(name))
    if not changed:
        return None
    name = changed[0]
    was, now = recorded.get(name), settings.get(name)
    return f"{', '.join(changed)} changed: {name} was {was!r} and is {now!r}"
