"""Damaged checkpoints must end in an error of this package, within seconds and within bounds of memory."""

from __future__ import annotations

import contextlib
import resource
import time
import tracemalloc
from collections.abc import Iterator

from dflash_jax.errors import DflashError

SECONDS = 10
BYTES = 200 << 20


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fails where a block takes more than `SECONDS` or `BYTES`; an allocation far above them fails by itself."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    # What the process has mapped already, and 4 GB: XLA reserves address space that it never uses.
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (4 << 30), limit[1]))
    tracemalloc.start()
    started = time.monotonic()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert time.monotonic() - started < SECONDS, "it took too long"
        assert peak < BYTES, f"it took {peak} bytes"
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, limit)


def refusal(load) -> str | None:
    """The sentence that `load` is refused with, None if it is not; any other exception goes through."""
    with bounded():
        try:
            load()
        except DflashError as error:
            text = str(error)
            assert "\n" not in text and len(text) < 1500, text[:2000]
            return text
    return None
