"""Work of an episode in a thread that has ended whenever its caller continues, also after a time limit.

A thread cannot be killed. So work that blocks brings `stop`, which ends what it waits for.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tentalis.agents.environments.protocol import EnvironmentFault

STOP_S = 30.0
"""Seconds in which work must have ended after `stop`."""
T = TypeVar("T")


class StuckThread(EnvironmentFault):
    """Work did not end after it was stopped, and may still change its environment. The environment is not scored,
    closed or begun again, and the process must be replaced."""


async def run_stoppable(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Runs work in a separate thread. If the caller is cancelled, it calls `stop` and waits for the end of the thread.

    Raises what the work raises, and StuckThread instead of CancelledError if it does not end within STOP_S.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again for the caller
            outcome.set_exception(error)

    # A daemon, so that a thread that does not end keeps no process from ending; and no pool that it could fill.
    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="episode-step", daemon=True).start()
    running = asyncio.wrap_future(outcome)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        if not await _ended(running):
            raise StuckThread(
                f"a step of the environment was stopped and did not end within {STOP_S:g} s: this process ends, and "
                "must be started again"
            ) from None
        raise


async def _ended(running: asyncio.Future[T]) -> bool:
    """Returns True when the work has ended, False if it has not within STOP_S. Further cancellations do not end the
    wait: the caller is being cancelled already."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STOP_S
    while not running.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({running}, timeout=left)
        except asyncio.CancelledError:
            continue
    return running.done()
