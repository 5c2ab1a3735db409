"""Runs commands as an operator types them, and keeps the processes that they leave in the background."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from tests.drill.fault import Sight
from tests.support import ROOT

PATIENCE_S = 240.0


class Shell:
    """bash in a folder, with `tentalis` on its PATH. `env` are the variables of every command."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        tools = folder / "bin"
        tools.mkdir(parents=True, exist_ok=True)
        tentalis = tools / "tentalis"
        tentalis.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tentalis.cli "$@"\n', encoding="utf-8")
        tentalis.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TENTALIS_")}
        kept |= {name: os.environ[name] for name in ("TENTALIS_CACHE",) if name in os.environ}
        path = f"{tools}:{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
        self.env = kept | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "400", "OMP_NUM_THREADS": "1"} | env
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
