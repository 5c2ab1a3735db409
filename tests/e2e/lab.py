"""Runs the product as a person does: the `tentalis` command in its own process, in a state directory of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tentalis.service.settings import Settings

CLI = [sys.executable, "-m", "tentalis.cli"]


class Home:
    """One local installation in a temporary folder, with the shared download cache."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.model = path, model
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("TENTALIS_")} | {
            "TENTALIS_HOME": str(path),
            **{key: os.environ[key] for key in ("TENTALIS_CACHE",) if key in os.environ},
        }

    def start_demo(self, *options: str) -> "subprocess.Popen[str]":
        """`tentalis demo -o json` in the background; stderr goes to demo.err in the home's parent."""
        command = [*CLI, "demo", "-o", "json", "--policy-model", str(self.model), *options]
        return subprocess.Popen(
            command,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("ab"),
            stdin=subprocess.DEVNULL,
            text=True,
        )

    @property
    def errors(self) -> Path:
        return self.path.parent / "demo.err"

    def finish(self, demo: "subprocess.Popen[str]", timeout: float) -> dict[str, Any]:
        """Waits for a demo; its stdout must be one JSON object and nothing else, its exit code 0."""
        try:
            stdout, _ = demo.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            demo.send_signal(signal.SIGINT)
            demo.communicate(timeout=20)
            raise AssertionError(f"the demo did not end within {timeout:g} s:\n{self.tail()}") from None
        assert demo.returncode == 0, f"exit code {demo.returncode}:\n{self.tail()}"
        result = json.loads(stdout)
        assert isinstance(result, dict)
        return result

    def run(
        self, *arguments: str, timeout: float = 300, stdin: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Any other command, to its end."""
        return subprocess.run(
            [*CLI, *arguments], env=self.env, capture_output=True, text=True, timeout=timeout, input=stdin, check=False
        )

    def settings(self) -> Settings:
        """Settings of a client of its broker, which keeps its port."""
        ports = json.loads((self.path / "ports.json").read_text())
        return Settings(bootstrap=f"127.0.0.1:{ports['broker']}", home=self.path)

    def processes(self) -> dict[str, dict[str, Any]]:
        """The supervisor's view: name -> pid, state, restarts."""
        status = self.path / "status.json"
        return dict(json.loads(status.read_text())["processes"]) if status.exists() else {}

    def tail(self, size: int = 3000) -> str:
        """The ends of the demo's stderr and of every log, for a failure message."""
        parts = [self.errors, *sorted((self.path / "logs").glob("*.log"))]
        return "\n".join(
            f"--- {part.name}\n{part.read_bytes()[-size:].decode(errors='replace')}" for part in parts if part.exists()
        )


def pids_of(home: Path) -> list[int]:
    """Every process whose environment names the state directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes()
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
            if f"TENTALIS_HOME={home}\0".encode() in environ:
                found.append(int(entry.name))
    return found
