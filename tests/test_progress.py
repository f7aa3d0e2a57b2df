"""What a person sees of something that goes on, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import time

import jax
import jax.numpy as jnp
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


def test_a_log_gets_a_line_also_while_nothing_comes_back(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with Bar("generating", 7, 2, Console(file=stream, width=100), each="answer"):
        time.sleep(3.2)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2 and lines[0] == "generating: 2/7 done"
    for seconds, line in enumerate(lines[1:], start=2):
        assert line == f"generating: 2/7 done; waiting for the next answer, {seconds} s so far"


def test_a_log_gets_no_line_twice(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with Bar("generating", 7, 2, Console(file=stream, width=100), each="answer") as bar:
        bar.doing("loading m")
        time.sleep(2.2)
        bar.at(2, "9 tokens/s")
        time.sleep(2.2)
        bar.at(3, "9 tokens/s")
    lines = stream.getvalue().splitlines()
    assert len(set(lines)) == len(lines) >= 5, lines
    assert lines[:2] == ["loading m: 2/7 done", "loading m: 2/7 done, 1 s so far"]
    assert "generating: 2/7 done, 9 tokens/s; waiting for the next answer, 2 s so far" in lines
    assert lines[-1] == "generating: 3/7 done, 9 tokens/s"


def test_a_log_says_what_is_being_compiled_and_how_long_it_took(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LONG_COMPILATION", 0.5)
    stream = io.StringIO()

    @jax.jit
    def slow_to_trace(x):
        time.sleep(2.2)
        return x

    with Bar("training", 0, 0, Console(file=stream, width=100)):
        slow_to_trace(jnp.ones(3))
    said = stream.getvalue()
    assert re.search(r"^tracing slow_to_trace, \d s so far$", said, re.MULTILINE)
    assert re.search(r"^slow_to_trace: (compiled|traced and loaded) in [23]\.\d s$", said, re.MULTILINE)


def test_silence_lasts_ten_seconds_at_most():
    assert progress.LINE_SECONDS <= 10


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_no_markup(monkeypatch, terminal):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, highlight=False)
    with Bar("reading [/b]:heart:\x07", 2, console=console) as bar:
        bar.at(1, "[/i]")
        bar.doing("loading [/u]")
        bar.note("[/s] :smile:\n")
    for text in ("reading [/b]:heart:\\x07", "[/i]", "loading [/u]", "[/s] :smile:\\n"):
        assert text in stream.getvalue()
