"""Runs slow verifiers in daemon threads, each call within a time limit."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from schemas.records import Result, Task
from tentalis.rewards.verdict import ResultVerifier, Scorer, Verdict

T = TypeVar("T")

THREAD_S = 60.0
"""Time limit of a slow verifier without a `time_limit_s`, in seconds."""
QUEUED_S = 3_600.0
"""Time limit of a verifier with `limits_itself`, in seconds: it ends its calls, and they may wait for each other."""
MAX_HUNG = 64
"""Limit of abandoned calls of one verifier that still run; at this limit the verifier is not called again."""

_hung: defaultdict[str, list[threading.Thread]] = defaultdict(list)


class Hung(Exception):
    """Too many calls of a verifier hang: another call would probably lose another thread."""


def time_limit_of(scorer: Scorer, default_s: float = THREAD_S) -> float:
    """Returns the time limit of one call of a scorer, in seconds."""
    if getattr(scorer, "limits_itself", False):
        return QUEUED_S
    return float(getattr(scorer, "time_limit_s", default_s))


async def verify_in_thread(scorer: ResultVerifier, task: Task, result: Result, default_s: float = THREAD_S) -> Verdict:
    """Returns the verdict of a slow verifier, within its time limit or else within `default_s` seconds.

    A call that takes longer is abandoned but not ended, because Python cannot end a thread. The thread keeps its
    resources until it returns. A thread that does not release the GIL stops the whole process, including its watchdog.

    Raises:
        TimeoutError: the call took longer than the limit.
        Hung: too many abandoned calls of the verifier still run.
        Exception: the error that the verifier raised.
    """
    hung = _hung[scorer.name]
    hung[:] = [thread for thread in hung if thread.is_alive()]
    if len(hung) >= MAX_HUNG:
        raise Hung(f"{len(hung)} timed-out calls of this verifier still run: it is not called again until one returns")
    async with asyncio.timeout(time_limit_of(scorer, default_s)):
        return await _in_thread(lambda: scorer.verify(task, result), hung)


async def _in_thread(work: Callable[[], T], abandoned: list[threading.Thread]) -> T:
    """Runs `work` in a daemon thread, so that a verifier that hangs does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(values: list[T], error: Exception | None) -> None:
        if future.done():
            return  # timed out, or cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(values[0])

    def run() -> None:
        values: list[T] = []
        error = None
        try:
            values.append(work())
        except Exception as failure:  # noqa: BLE001 - raised again where it is awaited
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, values, error)

    thread = threading.Thread(target=run, name="verifier", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        abandoned.append(thread)
        raise
