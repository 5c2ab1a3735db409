"""How every long-running process of ours ends within seconds when it is told to."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from tentalis import tracing

log = logging.getLogger(__name__)

# The supervisor allows 5 s in all.
GRACE_S = 4.0
# What a process ends with that was told to stop before its work was done (the shell's code for SIGTERM).
STOPPED = 143
# It stopped by its own decision, and starting it again would only undo that: a person has to look first.
NEEDS_PERSON = 5
# It cannot work with what it is given, and a restart gives it the same again.
UNMENDABLE = 7


class Unmendable(Exception):
    """What is wrong cannot be mended by starting again; the message names it and says what to do."""


def run_service(
    name: str, body: Callable[[threading.Event], None], *, stopped: int = 0, grace_s: float = GRACE_S
) -> int:
    """Runs `body` until it returns, or until SIGTERM or SIGINT sets the event it was given. Raises what `body` raised.
    Returns the exit code: 0, or `stopped` after a signal.

    The body has its own thread: a client that waits for an absent broker inside a C call would keep a signal handler
    from running. One that does not end within `grace_s` of the signal, or before a second one, is left behind, and the
    process exits with `stopped`: each of ours may be killed at any moment, so that loses nothing. To be called on the
    main thread.
    """
    stop, at_once = threading.Event(), threading.Event()
    raised: list[Exception] = []

    def run() -> None:
        try:
            body(stop)
        except Exception as error:  # noqa: BLE001 - raised again below, on the main thread
            raised.append(error)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {
        number: signal.signal(number, lambda *_: (at_once if stop.is_set() else stop).set()) for number in numbers
    }
    tracing.configure(name)
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
        while thread.is_alive() and not stop.is_set():
            thread.join(0.2)
        deadline = time.monotonic() + grace_s
        while thread.is_alive() and not at_once.is_set() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(0.2, left))
        if thread.is_alive():
            why = "was told to end again" if at_once.is_set() else f"did not end within {grace_s:g} s of being told to"
            log.warning("%s %s: left as it is", name, why)
            logging.shutdown()
            tracing.shutdown()
            os._exit(stopped)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if raised and stop.is_set():
        log.warning("while stopping: %s", raised[0])
    elif raised:
        raise raised[0]
    return stopped if stop.is_set() else 0
