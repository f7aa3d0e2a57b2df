"""Ending early on request."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
    """What was to be done ended early because a signal asked for it; the message says how far it came."""

    def __init__(self, message: str, number: signal.Signals):
        super().__init__(message)
        self.signal = number


class Stop:
    """Whether the process was asked to end, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def check(self, rest: str) -> None:
        """Raises Stopped if it was asked to end.

        Args:
          rest: of the message, after "stopped by SIGTERM": how far it came, and what running it again does.
        """
        if self.signal is not None:
            raise Stopped(f"stopped by {self.signal.name}{rest}", self.signal)

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Notes SIGINT and SIGTERM instead of being killed by them; a second one kills as usual.

    Outside the main thread signals stay what they are.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
