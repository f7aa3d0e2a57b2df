import time

import numpy as np
import pytest

from dflash_jax.errors import CheckpointError, quote, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [("62", "'62'"), (62.5, "62.5"), (None, "None"), ([[62]], "[[62]]"), ({"a": [1, None]}, "{'a': [1, None]}")],
)
def test_short_values_are_quoted_whole(value, text):
    assert quote(value) == text


@pytest.mark.parametrize(
    "value",
    [
        "x" * 5_000_000,
        b"x" * 5_000_000,
        "\n" * 5_000_000,
        10**5000,
        -(10**400),
        list(range(10**6)),
        {str(key): "y" * 1000 for key in range(10**5)},
        [[[[[["z" * 1000] * 100] * 100]]]],
        np.arange(10**6),
    ],
    ids=lambda value: type(value).__name__,
)
def test_long_values_are_cut_at_once(value):
    start = time.perf_counter()
    text = quote(value)
    assert time.perf_counter() - start < 1.0
    assert len(text) <= 120
    assert "\n" not in text


def test_what_json_may_hold_can_be_quoted():
    deep = value = []
    for _ in range(100_000):
        value.append([])
        value = value[0]
    assert len(quote(deep)) <= 120
    assert quote("\ud800") == "'\\ud800'"
    assert quote("a\nb") == "'a\\nb'"
    assert quote("a" * 50, limit=20) == "'" + "a" * 16 + "..."


def test_a_message_is_one_line_whatever_is_in_it():
    message = str(CheckpointError("a\nb\x1b[31m\x9bc\u2028d\u202ee\ud800\0 é 你 \U0001f600"))
    assert message == r"a\nb\x1b[31m\x9bc\u2028d\u202ee\ud800\x00 é 你 " + "\U0001f600"
    message.encode()


def test_what_may_stay_stays():
    assert visible("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
