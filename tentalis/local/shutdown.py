"""Signals of the commands that run a stack: as an event, or as an exception that unwinds the command."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tentalis.service.signal_thread import signals_handled


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Turns SIGINT, SIGTERM and SIGHUP into an event while the context is active. For the main thread of a command."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with signals_handled(numbers, event.set):
        yield event


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind the command as Ctrl-C does, so that its cleanup runs."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
