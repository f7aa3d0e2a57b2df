"""Which tests a quick run leaves out; see the marker `slow` in pyproject.toml."""

from __future__ import annotations

from typing import Any

import pytest


def mostly_slow(first: Any, *others: Any) -> list[Any]:
    """Values of a parameter, of which the first is enough for a quick run."""
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]
