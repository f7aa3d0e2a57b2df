"""Finding stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text for the stop string that is complete first.

    What is found depends on the text alone, not on where it was cut into pieces. Each character costs the
    same, however long the stop strings are (Knuth, Morris and Pratt's algorithm, one automaton for each).
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(self._stops)

    @property
    def begun(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, piece: str) -> tuple[int, int] | None:
        """Takes the next piece of the text.

        Returns:
          Where in this piece the first complete stop string ends, and the stop string's length; None if there is none.
          Of those that end together it is the longest.
        """
        if not any(self._matched) and self._first.isdisjoint(piece):
            return None
        for end, character in enumerate(piece, start=1):
            complete = 0
            for index, stop in enumerate(self._stops):
                borders, matched = self._borders[index], self._matched[index]
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    complete = max(complete, matched)
                    matched = borders[matched - 1]
                self._matched[index] = matched
            if complete:
                return end, complete
        return None


def _borders(stop: str) -> list[int]:
    """For each beginning of the stop string, the length of its longest proper end that also begins it."""
    borders = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[matched] != stop[index]:
            matched = borders[matched - 1]
        matched += stop[matched] == stop[index]
        borders[index] = matched
    return borders
