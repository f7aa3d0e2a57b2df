"""Mappings that live on the disk, so that a job of a million lines takes no more memory than one of ten."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, MutableMapping
from typing import Any

_CACHE_KIB = 4096
"""Memory that a mapping may take, at most."""


class DiskMap(MutableMapping[str, Any]):
    """Strings to JSON values, in a temporary file that vanishes with the mapping; in no order."""

    def __init__(self) -> None:
        # An empty name is a database of SQLite's own, which begins in memory and moves to a temporary file.
        self._base = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for pragma in (f"cache_size = -{_CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF"):
            self._base.execute(f"PRAGMA {pragma}")
        self._base.execute("CREATE TABLE entries (key BLOB PRIMARY KEY, value TEXT) WITHOUT ROWID")
        # Never committed: nobody else reads it.
        self._base.execute("BEGIN")
        self._count = 0

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __getitem__(self, key: str) -> Any:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        return json.loads(found[0])

    def __setitem__(self, key: str, value: Any) -> None:
        before = self._base.total_changes
        self._base.execute("INSERT OR IGNORE INTO entries VALUES (?, ?)", (_bytes(key), json.dumps(value)))
        if self._base.total_changes > before:
            self._count += 1
        else:
            self._base.execute("UPDATE entries SET value = ? WHERE key = ?", (json.dumps(value), _bytes(key)))

    def __delitem__(self, key: str) -> None:
        if not self._base.execute("DELETE FROM entries WHERE key = ?", (_bytes(key),)).rowcount:
            raise KeyError(key)
        self._count -= 1

    def __iter__(self) -> Iterator[str]:
        for (key,) in self._base.execute("SELECT key FROM entries"):
            yield key.decode("utf-8", "surrogatepass")

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forgets everything."""
        self._base.execute("DELETE FROM entries")
        self._count = 0

    def _find(self, key: str) -> tuple[str] | None:
        return self._base.execute("SELECT value FROM entries WHERE key = ?", (_bytes(key),)).fetchone()


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
