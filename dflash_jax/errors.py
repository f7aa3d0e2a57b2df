"""Errors meant for users: each message is one sentence that says what was wrong and what would be right."""

import re
import reprlib
from typing import Any


class DflashError(Exception):
    """Base of every error this package raises on purpose. The command line prints it and exits with 2.

    The message is one line, whatever names of files or words of others are in it.
    """

    def __init__(self, *args: object):
        """Takes the message; characters in it that would move a terminal's cursor or colour it are written out."""
        super().__init__(*(visible(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DflashError, ValueError):
    """A configuration, of a model or of a job, that cannot work."""


class CheckpointError(DflashError):
    """A checkpoint that is missing, incomplete or not what it claims to be."""


class TrainingError(DflashError):
    """A training run that cannot continue."""


class RequestError(DflashError, ValueError):
    """A request that can never be served."""


class StateError(DflashError, RuntimeError):
    """A state of an engine that cannot be used as it is asked for."""


class InvariantError(DflashError, AssertionError):
    """An engine invariant does not hold. The message begins with the invariant's name."""


# Control characters, ends of lines, changes of direction, and halves of surrogate pairs.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, keep: str = "") -> str:
    """A text without what moves a terminal's cursor, colours it or cannot be printed; Python's escapes stand for it.

    Args:
      text: anything.
      keep: characters that stay, such as newlines.
    """
    return _UNSEEN.sub(lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text)


class _Short(reprlib.Repr):
    """`repr` of at most some hundred characters, made without the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 3, 4, 6, 6
        self.maxstring = self.maxother = 100

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to write out integers of more than 4,300 digits.
        bits = value.bit_length()
        return repr(value) if bits <= 128 else f"<{'negative ' if value < 0 else ''}integer of {bits} bits>"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value) if len(value) <= 100 else f"{value[:97]!r}..."


def quote(value: Any, limit: int = 120) -> str:
    """A value as an error shows it: on one line, and cut where it is long.

    Args:
      value: anything; a string of megabytes costs no more than a short one.
      limit: characters, at most.
    """
    text = _Short().repr(value).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def reason(error: BaseException, limit: int = 200) -> str:
    """What a library's exception says, on one line and cut where it is long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= limit else lines[0][: limit - 3] + "..."


def cut(text: str, limit: int = 200) -> str:
    """Somebody else's words, or a name, as an error shows them: unquoted, and cut where they are long."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
