"""The process of an environment of verifiers, as its episodes see it: it starts, is asked, is killed, and starts again.

All episodes of this process share it. It has its own Python, so that the packages of verifiers and those of tentalis
need not fit together.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tentalis.agents.environments.protocol import EnvironmentFault

START_S = 300.0
"""Seconds in which an environment must be loaded with its data set."""
STOP_S = 10.0
"""Seconds in which an episode must stop; else the process is killed, with the episodes of others."""
CLEANUP_S = 60.0
"""Seconds in which the environment must clean up after an episode; else the process is killed."""
CHILD = Path(__file__).with_name("verifiers_child.py")
NEEDED = "verifiers==0.3.0"


class BadVerifiersEnvironment(ValueError):
    """An environment of verifiers that cannot be loaded or played; the message has the reason."""


@dataclass(frozen=True, slots=True)
class VerifiersSettings:
    """`name`, `arguments` (as JSON): of `load_environment`. `judge`: its rubric may call judge models. `python`: the
    interpreter. `folder`: added to its module path."""

    name: str
    arguments: str
    judge: bool
    python: Path
    folder: Path


class VerifiersProcess:
    """Starts at the first request or episode, and again after its end. Thread-safe."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self._settings = settings
        self._starting = threading.Lock()
        self._running: list[_Running] = []
        self._checked = False
        self._numbers = itertools.count()
        weakref.finalize(self, _end, self._running)

    def check(self) -> None:
        """Loads the environment, unless it could be loaded before. Blocks. Raises BadVerifiersEnvironment."""
        if self._checked:
            return
        try:
            self._current().wait_loaded()
        except EnvironmentFault as error:
            raise BadVerifiersEnvironment(str(error)) from error
        self._checked = True

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Returns the reply to a request of `verifiers_child`. Blocks. Raises EnvironmentFault."""
        return self._current().ask(op, **request)

    def episode(self) -> "VerifiersEpisode":
        """Returns a new episode, before its first request. Raises EnvironmentFault."""
        return VerifiersEpisode(self._current(), next(self._numbers))

    def _current(self) -> "_Running":
        with self._starting:
            if not (self._running and self._running[0].usable):
                while self._running:
                    self._running.pop().kill()
                self._running.append(_Running(self._settings))
            return self._running[0]


class VerifiersEpisode:
    """One episode. It ends with the run of the process that began it. `ask` and `close` block."""

    def __init__(self, running: "_Running", number: int) -> None:
        self._running, self._number = running, number

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Returns the reply to a request of `verifiers_child`. Raises EnvironmentFault, also if the process ends."""
        return self._running.ask(op, episode=self._number, **request)

    def stop(self) -> None:
        """Ends what the episode runs, without a wait: kills the process if that takes over STOP_S."""
        threading.Thread(target=self._stop, name="stop verifiers", daemon=True).start()

    def close(self) -> None:
        """Cleans up, unless the process has ended. Raises EnvironmentFault."""
        if not self._running.usable:
            return
        try:
            self._running.send({"op": "close", "episode": self._number}).result(CLEANUP_S)
        except TimeoutError as error:
            self._running.kill()
            raise EnvironmentFault(f"the cleanup of an episode took over {CLEANUP_S:g} s") from error

    def _stop(self) -> None:
        try:
            self._running.send({"op": "stop", "episode": self._number}).result(STOP_S)
        except (EnvironmentFault, TimeoutError):
            self._running.kill()


class _Running:
    """One run of the process. It loads the environment first; the constructor does not wait for that. Raises
    EnvironmentFault."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self._settings = settings
        self._what = f"the environment {settings.name} of verifiers"
        self._lock = threading.Lock()
        self._reaping = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self.usable = True
        command = [str(settings.python), "-P", str(CHILD), str(settings.folder)]
        try:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise EnvironmentFault(f"{self._what}: {settings.python} cannot be started: {error}") from error
        self._ending = threading.Thread(target=self._wait, name="verifiers end", daemon=True)
        self._ending.start()
        threading.Thread(target=self._read, name="verifiers replies", daemon=True).start()
        load = {"op": "load", "name": settings.name, "arguments": json.loads(settings.arguments)}
        self._loaded = self.send(load | {"judge": settings.judge})

    def wait_loaded(self) -> None:
        """Waits until the environment is loaded. Kills the process and raises EnvironmentFault if it cannot be."""
        try:
            self._loaded.result(START_S)
        except TimeoutError as error:
            self.kill()
            raise EnvironmentFault(f"{self._what} was not loaded within {START_S:g} s") from error
        except EnvironmentFault as error:
            self.kill()
            raise EnvironmentFault(f"{self._what}: {_advised(str(error), self._settings)}") from error

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Returns the reply to a request, after the environment is loaded. Raises EnvironmentFault."""
        self.wait_loaded()
        return self.send({"op": op, **request}).result()

    def send(self, request: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Sends a request and returns its reply to come, or an EnvironmentFault."""
        future: Future[dict[str, Any]] = Future()
        assert self._popen.stdin is not None
        with self._lock:
            if not self.usable:
                future.set_exception(EnvironmentFault("the process of verifiers has ended"))
                return future
            self._number += 1
            self._waiting[self._number] = future
            try:
                self._popen.stdin.write(json.dumps({"id": self._number, **request}).encode() + b"\n")
                self._popen.stdin.flush()
            except OSError:
                self.usable = False  # it reads no more: `_read` fails what waits, with the exit code
        return future

    def kill(self) -> None:
        """Kills the process and those that it started."""
        self.usable = False  # without the lock, which a request holds that the process does not read
        with self._reaping:
            if self._popen.returncode is None:
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends the process: it may tear the environment down before."""
        assert self._popen.stdin is not None
        with self._lock:
            self.usable = False
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        self._ending.join(STOP_S)
        self.kill()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if not line.endswith(b"\n"):
                break  # the process ended in this reply
            reply = json.loads(line)
            with self._lock:
                future = self._waiting.pop(reply["id"])
            if "error" in reply:
                future.set_exception(EnvironmentFault(reply["error"]))
            else:
                future.set_result(reply["ok"])
        self._ending.join()
        with self._lock:
            self.usable = False
            lost, self._waiting = self._waiting, {}
        fault = f"the process of verifiers ended, with exit code {self._popen.returncode}"
        for future in lost.values():
            future.set_exception(EnvironmentFault(fault))

    def _wait(self) -> None:
        """Kills what the process leaves behind: such processes may hold the pipe of the replies open. The process is
        waited for after that, so that nothing else has its number yet."""
        os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        self.usable = False
        with self._reaping:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()


def _advised(problem: str, settings: VerifiersSettings) -> str:
    if "No module named 'verifiers'" in problem:
        return f"{settings.python} has no package verifiers: {settings.python} -m pip install '{NEEDED}'"
    return problem


def _end(running: list[_Running]) -> None:
    while running:
        running.pop().end()
