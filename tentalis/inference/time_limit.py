"""Runs work that may never end, within a time limit and beside the event loop."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Interrupted(BaseException):
    """Raised inside work that takes too long. Not an Exception, so that the work's own handlers let it pass."""


class _Work(Generic[T]):
    """Work on a thread of its own, which only this work can be interrupted on."""

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop = work, loop
        self._lock = threading.Lock()
        self._runs = True
        self.future: asyncio.Future[T] = loop.create_future()
        self.thread = threading.Thread(target=self._run, name="time limit", daemon=True)

    def _run(self) -> None:
        try:
            try:
                value = self._work()
            except Exception as error:  # noqa: BLE001 - raised again where it is awaited
                self._end(self.future.set_exception, error)
            else:
                self._end(self.future.set_result, value)
        except _Interrupted:
            return

    def _end(self, settle: Callable[..., None], outcome: object) -> None:
        with self._lock:
            self._runs = False
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, settle, outcome)

    def _settle(self, settle: Callable[..., None], outcome: object) -> None:
        if not self.future.done():
            settle(outcome)

    def interrupt(self) -> None:
        """Ends the work at its next step in Python. A single call into C ends first."""
        with self._lock:
            if self._runs and self.thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread.ident), ctypes.py_object(_Interrupted)
                )


async def within(limit_s: float, work: Callable[[], T]) -> T:
    """Returns what `work` returns. Runs it on a thread, and interrupts it after `limit_s` seconds or if the caller is
    cancelled.

    Raises:
        TimeoutError: the work took longer than the limit.
        Exception: the error that the work raised.
    """
    running = _Work(work, asyncio.get_running_loop())
    running.thread.start()
    try:
        async with asyncio.timeout(limit_s):
            return await running.future
    finally:
        running.interrupt()
