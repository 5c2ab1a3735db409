"""Handles signals on a thread of their own."""

import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def signals_handled(numbers: Sequence[signal.Signals], handle: Callable[[], None]) -> Iterator[None]:
    """Calls `handle` once for each of these signals, one after the other, while the context is active. For the main
    thread.

    A handler of Python runs on the main thread, between any two steps of what that thread does, also of the same
    handler. So it may take no lock, and setting an Event does: a second signal would wait for the first for ever. Here
    the handler only puts into a SimpleQueue, which may interrupt itself."""
    received: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def work() -> None:
        while received.get() is not None:
            handle()

    thread = threading.Thread(target=work, name="signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, lambda arrived, _: received.put(arrived)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        received.put(None)
        thread.join(1.0)
