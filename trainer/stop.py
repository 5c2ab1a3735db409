"""SIGTERM and SIGINT: a request to stop at the next safe point, and an end in any case after a few seconds.

Every file is renamed into place and every record is in a transaction, so an abrupt end is as safe as a loss of power,
and a process that was asked to stop leaves without the interpreter's own clean-up, which can take seconds.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tentalis import tracing
from tentalis.heartbeat import Heart
from tentalis.service import STOPPED

log = logging.getLogger(__name__)

GRACE_SECONDS = 3.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """The process was asked to stop."""


class Stop:
    """Whether the process was asked to stop. Its safe points are where the loop shows that it is alive, too."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._heart = Heart()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Asks to stop."""
        self._asked.set()

    def check(self) -> None:
        """A safe point. Raises Stopped."""
        self._heart.beat()
        if self.asked:
            raise Stopped


@contextmanager
def stop_on_signals(exit_code: int = STOPPED, grace: float = GRACE_SECONDS) -> Iterator[Stop]:
    """While it is open SIGTERM and SIGINT ask to stop. A process that was asked ends with `exit_code` (STOPPED:
    nobody must take the run for finished) where the block ends, however it ends, or `grace` seconds later whatever
    runs. Elsewhere than in the main thread signals are not heard.

    A thread of its own hears the signal: Python's handlers wait for the main thread, which may be in a backward pass.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    hear, wake = socket.socketpair()
    wake.setblocking(False)
    done = threading.Event()

    def listen() -> None:
        while data := hear.recv(1):
            if data[0] in _SIGNALS:
                stop.ask()
                if not done.wait(grace):
                    os._exit(exit_code)
                return

    before = {number: signal.signal(number, lambda *_: stop.ask()) for number in _SIGNALS}
    previous = signal.set_wakeup_fd(wake.fileno())
    thread = threading.Thread(target=listen, name="stop", daemon=True)
    thread.start()
    try:
        yield stop
    except Stopped:
        log.info("stopped; the next start goes on from the last checkpoint")
    except Exception:
        if not stop.asked:
            raise
        # Peers that stopped first break the collective that this rank was in.
        log.warning("failed while it was stopping", exc_info=True)
    finally:
        if stop.asked:
            _leave(exit_code)
        done.set()
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        wake.close()
        thread.join(1.0)
        hear.close()


def _leave(exit_code: int) -> None:
    tracing.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
