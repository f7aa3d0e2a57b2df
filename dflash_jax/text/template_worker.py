"""Renders chat templates in a separate process: a script, which imports nothing of this package.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from everything but its arguments;
this process bounds its time and memory, which no check inside an interpreter can, since one operation such as
`'x' * 3000000000` takes all there is. Ending the process is always possible.

Requests come on the standard input and replies go to the standard output, each as eight bytes of length and JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import signal
import sys
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.sandbox

LONGEST_ERROR = 300


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what to train on. It is passed over, what stands in it is not."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's name for it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, closed to the names of Python's own attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own writes < and & as for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates may use: that of transformers' `apply_chat_template`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _render(template: str, context: dict[str, Any], most: int) -> str:
    """The rendered text.

    Args:
      template: Jinja.
      context: the template's variables.
      most: characters it may have.
    """
    pieces, length = [], 0
    for piece in _compiled(template).generate(context):
        length += len(piece)
        if length > most:
            raise jinja2.TemplateError(f"it writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _told(error: BaseException) -> str:
    """An error in a few words, whatever it is."""
    try:
        text = str(error)
    except Exception:
        text = ""
    if len(text) > LONGEST_ERROR:
        text = text[:LONGEST_ERROR] + "..."
    # A template may raise any string: no lines, and no halves of surrogate pairs, which nobody could print.
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{text}, at line {error.lineno} of the template"
    if isinstance(error, jinja2.TemplateError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _answer(request: bytes) -> bytes:
    try:
        reply = {"text": _render(**json.loads(request))}
        return json.dumps(reply).encode()
    except Exception as error:
        return json.dumps({"error": _told(error)}).encode()


def _limit(memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _time(seconds: float) -> None:
    """Lets the system end this process after so much processor time, and after ten times as much on the clock."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, 10 * seconds)


def serve(requests: BinaryIO, replies: BinaryIO, seconds: float, memory: int) -> None:
    """Answers requests until there are no more."""
    _limit(memory)
    while header := requests.read(8):
        request = requests.read(int.from_bytes(header))
        _time(seconds)
        reply = _answer(request)
        _time(0)
        replies.write(len(reply).to_bytes(8) + reply)
        replies.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]), int(sys.argv[2]))
