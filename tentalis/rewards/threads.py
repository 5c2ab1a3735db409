"""Slow verifiers, in threads that nobody waits for."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from schemas.records import Result, Task
from tentalis.rewards.verdict import Scorer, Verdict, Verifier

T = TypeVar("T")

THREAD_S = 60.0
"""Time limit of a slow verifier that has no `time_limit_s` of its own."""
MOST_HUNG = 64
"""Calls of one verifier that were given up and have not come back, past which it is called no more."""

_hung: defaultdict[str, list[threading.Thread]] = defaultdict(list)


class Hung(Exception):
    """So many calls of a verifier hang that another thread would only be lost too."""


def limit_of(scorer: Scorer, otherwise: float = THREAD_S) -> float:
    """Seconds that one call of a scorer may take."""
    return float(getattr(scorer, "time_limit_s", otherwise))


async def verified(scorer: Verifier, task: Task, result: Result, otherwise: float = THREAD_S) -> Verdict:
    """The verdict of a slow verifier, within its time limit (`otherwise`: of one that has none, in seconds).

    A call that takes longer is given up, not ended: no thread can be. It keeps what it holds until it comes back, and
    one that does not let go of the interpreter's lock stops the whole process, its watchdog too.

    Raises:
        TimeoutError: it took longer.
        Hung: too many of its calls have not come back.
        Exception: what the verifier raises.
    """
    hung = _hung[scorer.name]
    hung[:] = [thread for thread in hung if thread.is_alive()]
    if len(hung) >= MOST_HUNG:
        raise Hung(f"{len(hung)} calls of it have not come back: it is not called again before one does")
    async with asyncio.timeout(limit_of(scorer, otherwise)):
        return await _in_thread(lambda: scorer.verify(task, result), hung)


async def _in_thread(work: Callable[[], T], given_up: list[threading.Thread]) -> T:
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

    thread = threading.Thread(target=run, name="verifier", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        given_up.append(thread)
        raise
