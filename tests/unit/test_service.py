"""How a process ends: by itself, by an error, by a signal, and when it is stuck."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tentalis import service
from tentalis.service import run_service


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


def test_one_that_is_stuck_still_ends_with_zero() -> None:
    code = (
        "import threading, time, sys\n"
        "from tentalis import service\n"
        "service.GRACE_S = 0.2\n"
        "def stuck(stop):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
        "service.run_service('stuck', stuck)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "did not end within" in errors


def test_the_grace_is_less_than_the_supervisor_allows() -> None:
    assert service.GRACE_S < 5.0
