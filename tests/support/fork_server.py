"""Stream applications as processes that are forked from one which has loaded their libraries: importing these takes
longer than most of what a test does with an application.

They are separate processes: they have their own environment and clients, and can be frozen and killed. The tests of the
stack start applications as commands, without the loaded libraries.

Run as a program: forks a child for each command that arrives on the socket whose descriptor is its argument.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from schemas import topics
from tentalis.service.imports import without_collections
from tests.support import ROOT

_LIBRARIES = (
    *(f"streams.apps.{name}.processor" for name in ("aggregation", "experience", "hinting", "join", "scoring")),
    "streams.apps.sessions.processor",
    "streams.runtime.faust.guards",
    "streams.runtime.health",
    "streams.runtime.worker",
    "rocksdict",
    "tentalis.cli.main",
    *(f"tentalis.cli.serve.{name}" for name in ("app", "experience", "hinting", "join", "plain_streams", "scoring")),
    "tentalis.cli.serve.sessions",
    "tentalis.gateway.process",
    "tentalis.cli.shared.variable_checks",
    "tentalis.kafka.preflight",
)


class ForkedProcess(subprocess.Popen[bytes]):
    """`python COMMAND` as a forked process. COMMAND is `-m MODULE` or `-c CODE`, with arguments."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Appends what the process prints to `log`."""
        self.args = list(command)
        self.returncode = None
        status, sent = os.pipe()
        with log.open("ab") as output:
            request = json.dumps({"command": self.args, "env": dict(env)}).encode()
            socket.send_fds(_server(), [request], [output.fileno(), sent])
        os.close(sent)
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            if not (line := self._status.readline()):
                raise RuntimeError("the fork server has ended")
            self.returncode = int(line)
            self._status.close()
        return self.returncode


@cache
def _server() -> socket.socket:
    """Returns the socket of the server of this process. The server ends when the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        _STARTED.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
    return ours


_STARTED: list["subprocess.Popen[bytes]"] = []


def _next_command(requests: socket.socket) -> list[str]:
    """Forks a child for each request, and writes its process id and its exit code to the request's pipe. Returns in the
    children, with the command."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid in list(running):
                ended, code = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                        os.write(running[pid], b"%d\n" % os.waitstatus_to_exitcode(code))
                    os.close(running.pop(pid))
        if requests not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, 2**20, 2)
        if not message:  # the tests have ended
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            raise SystemExit
        output, status = descriptors
        if child := os.fork():
            os.close(output)
            os.write(status, b"%d\n" % child)
            running[child] = status
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, before)
        requests.close()
        for descriptor in (woken, wake, status, *running.values()):
            os.close(descriptor)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        request = json.loads(message)
        os.environ.clear()
        os.environ.update(request["env"])
        return list(request["command"])


def main() -> None:
    """Loads the libraries, serves, and is the command in each child."""
    with without_collections():
        for name in _LIBRARIES:
            importlib.import_module(name)
    gc.freeze()  # the memory of what is loaded stays shared
    kind, program, *arguments = _next_command(socket.socket(fileno=int(sys.argv[1])))
    topics.table.cache_clear()  # a variable may set its number of partitions
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
