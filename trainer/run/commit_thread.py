"""One commit at a time, on a thread beside the training loop: at most one step is trained and not yet committed."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.1

log = logging.getLogger(__name__)


class CommitThread(Generic[T]):
    """Runs one task at a time. Its result must be taken before the next one can begin."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._pending: Future[T] | None = None

    def begin(self, commit: Callable[[], T]) -> None:
        """Begins a commit. The result of the one before must have been taken."""
        assert self._pending is None, "the commit before was not taken"
        self._pending = self._executor.submit(commit)

    def take(self) -> T | None:
        """Returns the result of a commit that has ended; None while it runs, or if there is none. Raises its error."""
        return None if self._pending is None or not self._pending.done() else self._ended(self._pending)

    def wait(self, check: Callable[[], None]) -> T | None:
        """Waits for the commit under way and returns its result, None if there is none. Raises its error. Calls `check`
        while waiting; it may raise, and the commit then continues."""
        if self._pending is None:
            return None
        while not self._pending.done():
            check()
            try:
                self._pending.exception(POLL_SECONDS)
            except NotDone:
                continue
        return self._ended(self._pending)

    def close(self) -> None:
        """Waits until the commit under way has ended, however long that takes, and ends the thread. Logs an error that
        nobody has taken."""
        self._executor.shutdown(wait=True)
        if self._pending is not None and (error := self._pending.exception()) is not None:
            log.error("the last step was not committed: %s: %s", type(error).__name__, error)

    def _ended(self, commit: Future[T]) -> T:
        self._pending = None
        return commit.result()
