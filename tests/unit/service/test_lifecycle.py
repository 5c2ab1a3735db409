"""The ends of a process: by itself, by an error, by a signal, and when it is stuck."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tentalis.service import lifecycle
from tentalis.service.lifecycle import run_service


def test_it_returns_when_the_body_does_and_raises_what_it_raises() -> None:
    run_service("quick", lambda stop: None)

    def broken(stop: threading.Event) -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        run_service("broken", broken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    seen = []

    def body(stop: threading.Event) -> None:
        os.kill(os.getpid(), number)
        seen.append(stop.wait(10))
        raise RuntimeError("closing failed")  # after the signal: logged, not raised

    run_service("told", body)
    assert seen == [True]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("grace_s", "signals", "why"), [(0.2, 1, "did not end within"), (600.0, 2, "received a second signal")]
)
def test_one_that_is_stuck_still_ends_with_zero(grace_s: float, signals: int, why: str) -> None:
    code = (
        "import threading, time, sys\n"
        "from tentalis.service import lifecycle\n"
        "def stuck(stop):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
        "lifecycle.run_service('stuck', stuck, grace_s=float(sys.argv[1]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(grace_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(1.0)  # two that wait are one
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert why in errors


def test_the_grace_is_less_than_the_supervisor_allows() -> None:
    assert lifecycle.GRACE_S < 5.0


TWO_SIGNALS = """
import os, signal, threading
from tentalis.service.lifecycle import run_service

set_event, first, main = threading.Event.set, [True], threading.get_ident()

def interrupted(event):
    if threading.get_ident() == main and first:
        first.clear()
        with event._cond:  # as the event itself does
            os.kill(os.getpid(), signal.SIGINT)
            pass
    set_event(event)

threading.Event.set = interrupted

def body(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    stop.wait(30)

run_service("twice", body, stopped=3)
os._exit(3)
"""


def test_a_signal_in_the_handler_of_another_ends_the_service_too() -> None:
    """Ctrl-C in a terminal and a supervisor's signal come together."""
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], capture_output=True, timeout=20, check=False)
    assert done.returncode == 3, done.stderr
