"""Compiled programs take memory maps, several each, of which Linux allows a process 65,530: one more, and it dies."""

from __future__ import annotations

from pathlib import Path

import jax

from dflash_jax.programs import clear_programs

_MANY = 25_000


def let_go_of_programs() -> None:
    """Forgets all compiled programs if they are so many that the process comes near the limit."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY:
        clear_programs()
        jax.clear_caches()
