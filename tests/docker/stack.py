"""A project of docker compose, and the wait for something in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
