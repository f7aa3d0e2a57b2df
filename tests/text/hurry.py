"""Renderings of chat templates with little time, so that many that never end can be tried."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dflash_jax.text import render as rendering


@contextlib.contextmanager
def in_a_hurry(seconds: float = 0.2) -> Iterator[None]:
    """The process that renders is started again with this much processor time for each."""
    usual = rendering.SECONDS
    rendering._process._end()
    rendering.SECONDS = seconds
    try:
        yield
    finally:
        rendering._process._end()
        rendering.SECONDS = usual
