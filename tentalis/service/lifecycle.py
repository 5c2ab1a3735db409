"""Runs a long-running process such that it ends within seconds of a signal."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from tentalis.service import tracing
from tentalis.service.signal_thread import signals_handled

log = logging.getLogger(__name__)

# The supervisor allows 5 s in all.
GRACE_S = 4.0


class Unmendable(Exception):
    """An error that a restart cannot fix (ExitCode.PERMANENT); the message names it and the remedy."""


def run_service(
    name: str, body: Callable[[threading.Event], None], *, stopped: int = 0, grace_s: float = GRACE_S
) -> int:
    """Runs `body` until it returns, or until SIGTERM or SIGINT sets the event passed to it. Returns the exit code: 0,
    or `stopped` after a signal. Re-raises an exception of `body`. Must be called on the main thread.

    The body has its own thread: a client that waits for an unreachable broker inside a C call would keep a signal
    handler from running. If the body does not end within `grace_s` of the signal, or before a second signal, the
    process exits with `stopped` without it. This loses nothing: each of our processes may be killed at any moment.
    """
    stop, at_once = threading.Event(), threading.Event()
    raised: list[Exception] = []

    def run() -> None:
        try:
            body(stop)
        except Exception as error:  # noqa: BLE001 - raised again below, on the main thread
            raised.append(error)

    tracing.configure(name)
    thread = threading.Thread(target=run, name=name, daemon=True)
    with signals_handled((signal.SIGTERM, signal.SIGINT), lambda: at_once.set() if stop.is_set() else stop.set()):
        thread.start()
        while thread.is_alive() and not stop.is_set():
            thread.join(0.2)
        deadline = time.monotonic() + grace_s
        while thread.is_alive() and not at_once.is_set() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(0.2, left))
        if thread.is_alive():
            why = "received a second signal" if at_once.is_set() else f"did not end within {grace_s:g} s of the signal"
            log.warning("%s %s: exiting without waiting for it", name, why)
            logging.shutdown()
            tracing.shutdown()
            os._exit(stopped)
    if raised and stop.is_set():
        log.warning("error while stopping: %s", raised[0])
    elif raised:
        raise raised[0]
    return stopped if stop.is_set() else 0
