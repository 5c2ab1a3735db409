"""SIGTERM and SIGINT: request a stop at the next safe point, and force an end after a few seconds.

Every file is renamed into place and every record is in a transaction, so an abrupt end is as safe as a loss of power. A
process that was asked to stop therefore skips the interpreter's clean-up, which can take seconds.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tentalis.service import tracing
from tentalis.service.exit_codes import ExitCode
from tentalis.service.heartbeat import Heart

log = logging.getLogger(__name__)

GRACE_SECONDS = 3.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """The process was asked to stop."""


class StopRequest:
    """The request to stop. Its safe points also serve as the loop's heartbeat."""

    def __init__(self) -> None:
        # No lock, as an Event has: a handler may interrupt itself on the same thread, and would wait for its own lock.
        self._requested = False
        self._heartbeat = Heart()

    @property
    def requested(self) -> bool:
        return self._requested

    def request(self) -> None:
        """Asks to stop. Safe in handlers of signals."""
        self._requested = True

    def check(self) -> None:
        """Marks a safe point. Raises StopRequested if a stop was requested."""
        self._heartbeat.beat()
        self.check_starting()

    def check_starting(self) -> None:
        """Like `check`, before the work begins: marks nothing. Raises StopRequested if a stop was requested."""
        if self.requested:
            raise StopRequested


@contextmanager
def stop_on_signals(
    exit_code: int = ExitCode.STOPPED,
    grace: float = GRACE_SECONDS,
    *,
    then: str = "the next start continues from the last checkpoint",
) -> Iterator[StopRequest]:
    """Turns SIGTERM and SIGINT into requests to stop while the context is open. After a request the process ends with
    `exit_code` (STOPPED: callers must not take the run for finished) when the block ends, in any way, or `grace`
    seconds later. Outside the main thread signals are not handled. `then`: what the log says of a later start.

    A separate thread receives the signal: Python's handlers wait for the main thread, which may be in a backward pass.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    done = threading.Event()

    def listen() -> None:
        while data := receiver.recv(1):
            if data[0] in _SIGNALS:
                stop.request()
                if not done.wait(grace):
                    os._exit(exit_code)
                return

    previous_handlers = {number: signal.signal(number, lambda *_: stop.request()) for number in _SIGNALS}
    previous_wakeup_fd = signal.set_wakeup_fd(sender.fileno())
    thread = threading.Thread(target=listen, name="stop", daemon=True)
    thread.start()
    try:
        yield stop
    except StopRequested:
        log.info("stopped; %s", then)
    except Exception:
        if not stop.requested:
            raise
        # Peers that stopped first break the collective that this rank was in.
        log.warning("failed while stopping", exc_info=True)
    finally:
        if stop.requested:
            _exit_now(exit_code)
        done.set()
        signal.set_wakeup_fd(previous_wakeup_fd)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        sender.close()
        thread.join(1.0)
        receiver.close()


def _exit_now(exit_code: int) -> None:
    tracing.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
