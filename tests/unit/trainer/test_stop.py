"""The end of a trainer that is told to stop."""

import signal
import subprocess
import sys

import pytest

from tentalis.cli.shared.errors import explain
from tentalis.service.exit_codes import ExitCode
from trainer.run.resume import CannotResume
from trainer.step.engine import TrainingDiverged

PROGRAM = """
import hashlib, sys, time
from trainer.distributed.stop import stop_on_signals
with stop_on_signals(exit_code=int(sys.argv[2]), grace=0.3) as stop:
    print("ready", flush=True)
    if sys.argv[1] == "stuck":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes without a safe point, as a backward pass
    while True:
        if sys.argv[1] == "broken" and stop.requested:
            raise RuntimeError("the peers are gone")
        if sys.argv[1] == "orderly":
            stop.check()
        time.sleep(0.01)
"""


@pytest.mark.parametrize("error", [TrainingDiverged, CannotResume])
def test_what_the_next_start_would_only_come_to_again_says_so_with_its_exit_code(error: type[Exception]) -> None:
    """Restarted for ever, a stack would train the same step again and again, and nobody would look."""
    assert explain(error("why")) == ("why", ExitCode.PERMANENT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("how", "code"), [("orderly", 0), ("stuck", 0), ("broken", 0), ("orderly", 1)])
def test_a_signal_ends_it_soon_with_its_exit_code(how: str, code: int, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code
    assert (b"the peers are gone" in errors) == (how == "broken")


def test_an_error_that_no_signal_caused_is_raised() -> None:
    program = PROGRAM.replace("and stop.requested", "")
    done = subprocess.run([sys.executable, "-c", program, "broken", "0"], capture_output=True, timeout=30, check=False)
    assert done.returncode == 1
    assert b"RuntimeError: the peers are gone" in done.stderr


def test_the_log_says_what_a_later_start_does() -> None:
    program = PROGRAM.replace("grace=0.3", "grace=0.3, then='begin anew'").replace(
        "import hashlib", "import logging, hashlib"
    )
    program = program.replace("with stop_on", "logging.basicConfig(level='INFO')\nwith stop_on").replace(
        'print("ready", flush=True)', "stop.request()"
    )
    done = subprocess.run([sys.executable, "-c", program, "orderly", "7"], capture_output=True, timeout=30, check=False)
    assert done.returncode == 7 and b"stopped; begin anew" in done.stderr


TWICE = """
import os, signal, sys
from trainer.distributed import stop as module

request, left = module.StopRequest.request, [40]

def at_each_line(frame, event, arg):
    if left and event == "line":
        left[0] -= 1
        os.kill(os.getpid(), signal.SIGINT)
    return at_each_line

def traced(self):
    if sys.gettrace() is None and left[0] == 40:
        sys.settrace(at_each_line)
        request(self)
        sys.settrace(None)
    else:
        request(self)

with module.stop_on_signals(exit_code=3, grace=2.0) as stop:
    module.StopRequest.request = traced
    signal.set_wakeup_fd(-1)
    os.kill(os.getpid(), signal.SIGINT)
    while not stop.requested:
        pass
"""


def test_a_signal_in_the_handler_of_another_ends_it_too() -> None:
    """A terminal's Ctrl-C and a launcher's come together. The handler took a lock, and was interrupted by itself."""
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
