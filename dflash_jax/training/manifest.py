"""Manifests: JSON files that record the settings something was made with, to compare with those asked for now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.errors import ConfigError, quote
from dflash_jax.writing import replace_file


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def write_manifest(file: Path, settings: Mapping[str, Any]) -> None:
    """Records settings, which must be plain JSON values. A file that has them already is not touched."""
    content = json.dumps(dict(settings), indent=2) + "\n"
    if not file.exists() or file.read_bytes() != content.encode():
        replace_file(file, content)


def read_manifest(file: Path) -> dict[str, Any]:
    """The settings in a manifest.

    Raises:
      ConfigError: the file is damaged.
    """
    try:
        recorded = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({error}); restore it, or give another directory") from None
    if not isinstance(recorded, dict):
        raise ConfigError(f"{file} holds {quote(recorded)} instead of settings; restore it, or give another directory")
    return recorded


def difference(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """How settings differ from recorded ones, as a clause; None if they are the same."""
    changed = sorted(name for name in {*settings, *recorded} if settings.get(name) != recorded.get(name))
    if not changed:
        return None
    name = changed[0]
    was, now = recorded.get(name), settings.get(name)
    # A damaged manifest may have names of any length.
    names = ", ".join(changed)[:300]
    return f"{names} changed: {name[:100]} was {quote(was)} and is {quote(now)}"
