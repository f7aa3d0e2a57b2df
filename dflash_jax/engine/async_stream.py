"""A stream of updates for `async for`: a thread of its own advances it, so that the event loop never waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dflash_jax.engine.output import Update

T = TypeVar("T")


async def stream_async(begin: Callable[[], Generator[Update, None, None]]) -> AsyncGenerator[Update, None]:
    """The updates of a stream.

    When it is closed or its task is cancelled, the stream is closed in its thread, as soon as the step under way is
    done.

    Args:
      begin: makes the stream.
    """
    # One thread, so that closing comes after the step that is under way, which nothing can interrupt.
    thread = ThreadPoolExecutor(1, thread_name_prefix="dflash_jax-stream")
    begun: list[Generator[Update, None, None]] = []

    def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.shield(asyncio.wrap_future(thread.submit(call)))

    def close() -> None:
        for stream in begun:
            stream.close()

    try:
        await in_thread(lambda: begun.append(begin()))
        while (update := await in_thread(lambda: next(begun[0], None))) is not None:
            yield update
    finally:
        try:
            await in_thread(close)
        finally:
            thread.shutdown(wait=False)
