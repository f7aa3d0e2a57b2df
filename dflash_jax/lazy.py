"""Packages that import what they export when it is first asked for.

A config is then read, and refused if it is wrong, before JAX is imported, which takes seconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
      package: its name.
      modules: the names it exports, by the module below it that has them.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def getattr_(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{places[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return getattr_, dir_
