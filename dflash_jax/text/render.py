"""Rendering of chat templates, bounded in time, memory and length; see `template_worker` for how."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.errors import RequestError

SECONDS = 2.0
"""Processor time that one rendering may take. Templates of published models take a millisecond."""

MEMORY = 1 << 30
"""Bytes of memory that the rendering process may have."""

_WORKER = Path(__file__).with_name("template_worker.py")
# Templates see none of these; the process needs them to start, and to know the time of day.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


def render(template: str, context: Mapping[str, Any]) -> str:
    """A chat template's text.

    Args:
      template: Jinja, as transformers' chat templates are written.
      context: the template's variables, of JSON's types.

    Raises:
      RequestError: the variables are not of JSON's types, or the template raises, takes too long or writes too much.
    """
    try:
        variables = json.dumps(context)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages, tools and chat_template_kwargs must be JSON values ({error})") from None
    # What is longer repeats its input without end. It would take the tokenizer longer than the template.
    most = (1 << 20) + 4 * len(variables)
    request = f'{{"template": {json.dumps(template)}, "most": {most}, "context": {variables}}}'
    reply = _process.ask(request.encode())
    if "text" in reply:
        return reply["text"]
    if "error" in reply:
        raise RequestError(f"the model's chat template rejects the messages ({reply['error']})")
    raise RequestError(f"the model's chat template cannot be rendered with these messages ({reply['failure']})")


class _Process:
    """The process that renders, started when it is first needed and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self._end)

    def ask(self, request: bytes) -> dict[str, str]:
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(len(request).to_bytes(8) + request)
                process.stdin.flush()
                length = int.from_bytes(process.stdout.read(8))
                reply = process.stdout.read(length)
                if length and len(reply) == length:
                    return json.loads(reply)
            except OSError:
                pass
            except BaseException:
                # Half a request or reply is in the pipes.
                self._end()
                raise
            return {"failure": _reason(self._end())}

    def _started(self) -> subprocess.Popen[bytes]:
        # After a fork the pipes are the parent's.
        if self._process is None or self._owner != os.getpid():
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-P", str(_WORKER), str(SECONDS), str(MEMORY)]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    # Ctrl-C is for the job, which ends the rendering itself.
                    start_new_session=True,
                )
            except OSError as error:
                raise RequestError(f"no process can be started to render the chat template ({error})") from error
            self._owner = os.getpid()
        return self._process

    def _end(self) -> int | None:
        """Ends the process, and returns how it ended."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return None
        assert process.stdin is not None and process.stdout is not None
        # A process that ended by itself is let end, which says why.
        process.stdout.close()
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _reason(returncode: int | None) -> str:
    """Why the process gave no reply."""
    if returncode in _OUT_OF_TIME:
        return f"it takes more than {SECONDS:g} seconds"
    if returncode is not None and returncode < 0:
        return f"it ended the process that renders it, by signal {-returncode}"
    return f"the process that renders it ended with {returncode}"


# Systems that have no such signals end nothing by them.
_OUT_OF_TIME = tuple(-getattr(signal, name) for name in ("SIGPROF", "SIGALRM") if hasattr(signal, name))
_process = _Process()
