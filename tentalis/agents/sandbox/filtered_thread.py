"""A thread under a filter of system calls, which the processes that it starts inherit. It costs no process."""

import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from tentalis.agents.sandbox.bubblewrap_init import confine
from tentalis.agents.sandbox.syscall_filter import sandlock_filter

T = TypeVar("T")
_HAS_FILTER = platform.machine() == "x86_64"


class FilteredThread(Generic[T]):
    """Runs a function in a thread of its own, under the filter of sandlock.

    The thread lives until `end` is called: the kernel kills what sandlock started when the thread that started it ends.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done: Future[T] = Future()
        self._may_end = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            if _HAS_FILTER:
                confine(sandlock_filter())
            found = self._work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for the result
            self._done.set_exception(error)
            return
        self._done.set_result(found)
        self._may_end.wait()

    def result(self) -> T:
        """Returns what the function returned, or raises what it raised."""
        return self._done.result()

    def end(self) -> None:
        """Lets the thread end."""
        self._may_end.set()
