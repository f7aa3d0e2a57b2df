"""What a person sees of something that goes on, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dflash_jax import progress
from dflash_jax.progress import Bar


def shown(monkeypatch, terminal: bool, seconds: float) -> str:
    monkeypatch.setattr(progress, "LINE_SECONDS", seconds)
    stream = io.StringIO()
    with Bar("training", 7, 2, Console(file=stream, force_terminal=terminal, width=100)) as bar:
        bar.note("nothing is evaluated: [none]")
        bar.at(3, "loss 1.5")
        bar.at(4)
        bar.doing("evaluating")
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    assert shown(monkeypatch, False, 0).splitlines() == [
        "nothing is evaluated: [none]",
        "training: 3/7 done, loss 1.5",
        "training: 4/7 done, loss 1.5",
        "evaluating: 4/7 done",
    ]
    assert "training:" not in shown(monkeypatch, False, 1000)


@pytest.mark.parametrize("text", ["training", "4/7", "loss 1.5", "evaluating"])
def test_a_terminal_gets_a_bar(monkeypatch, text):
    assert text in shown(monkeypatch, True, 0)
