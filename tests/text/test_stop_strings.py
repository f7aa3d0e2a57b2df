"""The stop string that is complete first, however the text was cut into pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.text.stop_strings import StopStrings


def find(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the first complete stop string ends, by looking at every beginning of the text."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end, max(lengths)
    return None


LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_what_is_found_depends_on_the_text_alone(pieces, stops):
    watch, before = StopStrings(stops), ""
    for piece in pieces:
        found = watch.feed(piece)
        if found is not None:
            assert (len(before) + found[0], found[1]) == find(before + piece, stops)
            return
        before += piece
        assert find(before, stops) is None
        begun = [n for n in range(1, len(before) + 1) if any(stop.startswith(before[-n:]) for stop in stops)]
        assert watch.begun == max(begun, default=0)


@pytest.mark.parametrize("pieces", [["xabcx"], ["xa", "bcx"], ["x", "a", "b", "c", "x"]], ids=len)
def test_a_stop_string_inside_another_ends_the_text_although_the_other_began_first(pieces):
    watch = StopStrings(["abc", "b"])
    found = [watch.feed(piece) for piece in pieces]
    assert next(hit for hit in found if hit)[1] == len("b")


def test_long_stop_strings_that_nearly_match_cost_little():
    watch = StopStrings(["a" * 20_000 + "b"])
    start = time.perf_counter()
    for _ in range(100):
        assert watch.feed("a" * 1000) is None
    assert watch.begun == 20_000
    assert time.perf_counter() - start < 5
