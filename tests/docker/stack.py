"""A project of docker compose, and the wait for something in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.docker.engine import Docker
from tests.support import ROOT

PROJECT = "tentalis-test"


@dataclass
class Stack:
    """One project of docker compose."""

    docker: Docker
    variables: Mapping[str, str]

    def __call__(self, *arguments: str, timeout: float = 120.0, check: bool = True) -> str:
        return self.docker(
            "compose", "--project-name", PROJECT, "--file", str(ROOT / "docker-compose.yml"), *arguments,
            timeout=timeout, check=check, **self.variables,
        )  # fmt: skip

    def inside(self, *command: str, timeout: float = 120.0, check: bool = True) -> str:
        """Returns the output of a command in the container of the gateway, logs aside."""
        return self(
            "exec", "-T", "gateway", "sh", "-c", f"{' '.join(command)} 2>/dev/null", timeout=timeout, check=check
        )


def wait_for(what: str, seconds: float, check: Callable[[], Any], every: float = 5.0) -> Any:
    """Returns the first true result of `check`. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(every)
    return found
