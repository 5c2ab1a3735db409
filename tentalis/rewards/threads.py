"""Work that may block, in threads that nobody waits for."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """In a thread that nobody waits for when the process ends: a verifier that hangs must not keep it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(done: list[T], error: Exception | None) -> None:
        if future.done():
            return  # timed out, or cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(done[0])

    def run() -> None:
        done: list[T] = []
        error = None
        try:
            done.append(work())
        except Exception as failure:  # noqa: BLE001 - raised again where it is awaited
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, done, error)

    threading.Thread(target=run, name="verifier", daemon=True).start()
    return await future
