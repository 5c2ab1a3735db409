"""Keeps an ended process in place until SIGTERM, for supervisors that restart whatever ends.

Kubernetes and Docker start an ended process again, with ever longer pauses, although a restart does not repair what
ExitCode.NEEDS_OPERATOR and ExitCode.PERMANENT stand for, and a finished run has nothing left to do. So such a process
replaces itself by `python -m tentalis.service.hold PROCESS CODE PORT`, which frees its memory and its GPU.
"""

import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from tentalis.service import logs
from tentalis.service.exit_codes import ExitCode
from tentalis.service.health import Health, served
from tentalis.service.metrics import Exporter
from tentalis.service.signal_thread import signals_handled

log = logging.getLogger(__name__)


def become_held(process: str, code: int, port: int) -> NoReturn:
    """Replaces this process by one that serves health on `port`, and ends with `code` at SIGTERM."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", __name__, process, str(int(code)), str(port)])


def hold(process: str, code: int, port: int) -> None:
    """Returns at SIGTERM or SIGINT. Until then `/healthz` on `port` answers 200. `/readyz` answers 200 if the work
    is done (ExitCode.OK), else 503 with the exit code. Must be called on the main thread. Raises PortTaken."""
    stop = threading.Event()
    problem = reason(code)
    with signals_handled((signal.SIGTERM, signal.SIGINT), stop.set):
        log.warning("%s %s. It is held until SIGTERM (TENTALIS_HOLD)", process, problem or "has done its work")
        with served(Health(Exporter(process), lambda: problem), port):
            stop.wait()


def reason(code: int) -> str | None:
    """Returns the reason for which a held process is not ready; None if its work is done."""
    if code == ExitCode.OK:
        return None
    (meaning,) = [each.summary for each in ExitCode if each == code]
    return f"ended with exit code {code} ({meaning}): its log has the reason; remove the cause, then restart it"


if __name__ == "__main__":
    logs.configure("INFO")
    hold(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(int(sys.argv[2]))
