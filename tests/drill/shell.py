"""Runs commands as an operator types them, and keeps the processes that they leave in the background."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.drill.fault import Sight
from tests.support.transcript import ShownCommand, operator_environment

PATIENCE_S = 600.0
EXPORT = re.compile(r"export ([A-Z_]+)=([^\s$`'\"]+)")


class Shell:
    """bash in a folder, with `tentalis` on its PATH. `env` are the variables of every command."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = operator_environment(folder, {"COLUMNS": "400", "OMP_NUM_THREADS": "1"} | env)
        self._groups: list[subprocess.Popen[bytes]] = []

    def run(self, command: str, timeout: float = PATIENCE_S) -> Sight:
        """Runs a command to its end; its exit code, and all that it printed."""
        out = self.folder / "command.log"
        with out.open("wb") as sink:
            process = self._popen(command, sink)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            text = f"{out.read_text(errors='replace')}\nno end after {timeout:g} s"
            return Sight(code=124, says=text)
        return Sight(code=code, says=out.read_text(errors="replace"))

    def begin(self, command: str, log: Path | None = None) -> subprocess.Popen[bytes]:
        """Starts a command in the background."""
        with (log or self.folder / "background.log").open("ab") as sink:
            process = self._popen(f"exec {command}" if log else command, sink)
        self._groups.append(process)
        return process

    def follow(self, commands: Sequence[ShownCommand]) -> None:
        """Runs the commands of a transcript, one that ends with `&` in the background. `export NAME=VALUE` holds for
        all later commands of the site. Raises PageMismatch."""
        for command in commands:
            if exported := EXPORT.fullmatch(command.text):
                self.env[exported[1]] = exported[2]
                continue
            if command.text.endswith("&"):
                self.begin(command.text[:-1])
                continue
            done = self.run(command.text)
            assert done.code is not None
            command.check(done.code, done.says)

    @property
    def newest(self) -> subprocess.Popen[bytes]:
        """The process that was begun last, by `begin` or by a transcript."""
        return self._groups[-1]

    def _popen(self, command: str, sink: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[bytes], grace: float = 10.0) -> int:
        """Ends a process of `begin` with SIGTERM, all others of its group with SIGKILL; its exit code."""
        if process in self._groups:
            self._groups.remove(process)
        self._signal(process, signal.SIGCONT)
        self._signal(process, signal.SIGTERM)
        try:
            code = process.wait(grace)
        except subprocess.TimeoutExpired:
            code = 124
        self._signal(process, signal.SIGKILL)
        process.wait()
        return code

    def close(self) -> None:
        """Ends everything that runs in the background."""
        for process in reversed(self._groups):
            self._signal(process, signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        for process in list(self._groups):
            self.end(process, max(0.1, deadline - time.monotonic()))

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
