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
    """Starts at the first request, and again after its end. Thread-safe; `ask` blocks."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self._settings = settings
        self._starting = threading.Lock()
        self._running: list[_Running] = []
        self._numbers = itertools.count()
        weakref.finalize(self, _end, self._running)

    def start(self) -> Mapping[str, Any]:
        """Starts the process unless it runs; returns the version of verifiers and the kind of the environment. Raises
        BadVerifiersEnvironment."""
        return self._current().description

    def new_episode(self) -> int:
        """Returns a number for an episode."""
        return next(self._numbers)

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Returns the reply to a request of `verifiers_child`. Raises EnvironmentFault, also if the process ends."""
        try:
            running = self._current()
        except BadVerifiersEnvironment as error:
            raise EnvironmentFault(str(error)) from error
        return running.ask({"op": op, **request}).result()

    def stop(self, episode: int) -> None:
        """Ends what an episode runs, without a wait: kills the process if that takes over STOP_S."""
        threading.Thread(target=self._stop, args=(episode,), name="stop verifiers", daemon=True).start()

    def _stop(self, episode: int) -> None:
        for running in [*self._running]:
            try:
                running.ask({"op": "stop", "episode": episode}).result(STOP_S)
            except (EnvironmentFault, TimeoutError):
                running.kill()

    def _current(self) -> "_Running":
        with self._starting:
            if not (self._running and self._running[0].usable):
                _end(self._running)
                self._running.append(_Running(self._settings))
            return self._running[0]


class _Running:
    """One run of the process. The constructor loads the environment, and raises BadVerifiersEnvironment."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self.usable = True
        what = f"the environment {settings.name} of verifiers"
        command = [str(settings.python), "-P", str(CHILD), str(settings.folder)]
        try:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise BadVerifiersEnvironment(f"{what}: {settings.python} cannot be started: {error}") from error
        threading.Thread(target=self._read, name="verifiers replies", daemon=True).start()
        threading.Thread(target=self._wait, name="verifiers end", daemon=True).start()
        request = {"op": "load", "name": settings.name, "arguments": json.loads(settings.arguments)}
        try:
            self.description = self.ask(request | {"judge": settings.judge}).result(START_S)
        except TimeoutError as error:
            self.kill()
            raise BadVerifiersEnvironment(f"{what} was not loaded within {START_S:g} s") from error
        except EnvironmentFault as error:
            self.kill()
            raise BadVerifiersEnvironment(f"{what}: {_advised(str(error), settings)}") from error

    def ask(self, request: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Sends a request and returns its reply to come, or an EnvironmentFault."""
        future: Future[dict[str, Any]] = Future()
        assert self._popen.stdin is not None
        with self._lock:
            if not self.usable:
                raise EnvironmentFault("the process of verifiers has ended")
            self._number += 1
            self._waiting[self._number] = future
            try:
                self._popen.stdin.write(json.dumps({"id": self._number, **request}).encode() + b"\n")
                self._popen.stdin.flush()
            except OSError as error:
                raise EnvironmentFault(f"the process of verifiers has ended: {error}") from error
        return future

    def kill(self) -> None:
        """Kills the process and those that it started."""
        with self._lock:
            self.usable = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends the process: it may tear the environment down before."""
        with self._lock:
            self.usable = False
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(STOP_S)
        self.kill()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            reply = json.loads(line)
            with self._lock:
                future = self._waiting.pop(reply["id"])
            if "error" in reply:
                future.set_exception(EnvironmentFault(reply["error"]))
            else:
                future.set_result(reply["ok"])
        with self._lock:
            self.usable = False
            lost, self._waiting = self._waiting, {}
        fault = f"the process of verifiers ended, with exit code {self._popen.wait()}"
        for future in lost.values():
            future.set_exception(EnvironmentFault(fault))

    def _wait(self) -> None:
        """Kills what the process leaves behind: such processes may hold the pipe of the replies open."""
        self._popen.wait()
        self.kill()


def _advised(problem: str, settings: VerifiersSettings) -> str:
    if "No module named 'verifiers'" in problem:
        return f"{settings.python} has no package verifiers: {settings.python} -m pip install '{NEEDED}'"
    return problem


def _end(running: list[_Running]) -> None:
    while running:
        running.pop().end()
