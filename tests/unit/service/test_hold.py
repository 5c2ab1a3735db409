"""A process that ended with a code of TENTALIS_HOLD stays until SIGTERM, alive and not ready."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tentalis.local.ports import free_port
from tentalis.service.hold import reason
from tentalis.service.variable import BadVariable
from tentalis.service.variables import HOLD
from tests.support.http_get import answer_of


def test_a_held_process_is_alive_and_tells_why_it_is_not_ready(tmp_path: Path) -> None:
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TENTALIS_")}
    environment |= {"TENTALIS_HOME": str(tmp_path), "TENTALIS_HOLD": "4,7"}  # 4: there is no broker
    environment |= {"TENTALIS_METRICS_PORT": str(port)}
    command = [sys.executable, "-c", "from tentalis.cli.main import app; app()", "serve", "join"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert _answer(port, "/readyz", process) == (
                503,
                "not ready: ended with exit code 4 (unreachable): "
                "its log has the reason; remove the cause, then restart it\n",
            )
            assert _answer(port, "/healthz", process) == (200, "ok\n")
            process.terminate()
            assert process.wait(30) == 4
        finally:
            process.kill()


def _answer(port: int, path: str, process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Returns status and body, once the process answers."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        status, body = answer_of(port, path)
        if status:
            return status, body
        time.sleep(0.1)
    raise AssertionError(f"ended with {process.poll()}, or no answer in time")


def test_a_process_whose_work_is_done_is_ready() -> None:
    assert reason(0) is None
    assert reason(5) is not None


def test_the_variable_takes_exit_codes_only() -> None:
    assert HOLD.parse("0,5,7") == {0, 5, 7}
    for wrong in ("5;7", "8", "five"):
        with pytest.raises(BadVariable, match="exit codes of Tentalis"):
            HOLD.parse(wrong)
