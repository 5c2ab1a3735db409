"""Looks at what this machine offers to a first configuration: Kafka, GPU, Docker, Ollama, API keys."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from tentalis.service import variables

KAFKA_PORT, OLLAMA_PORT = 9092, 11434
_LOCAL = "127.0.0.1"
_WAIT_S = 2.0
_PROGRAM_S = 20.0

API_KEYS: Mapping[str, str] = {
    "OPENAI_API_KEY": "https://api.openai.com",
    "OPENROUTER_API_KEY": "https://openrouter.ai/api",
}
"""Variables with keys of OpenAI-compatible servers, and their addresses."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of a machine that were found.

    Attributes:
        kafka: bootstrap servers: those of the environment, or of this machine; None if nothing answers.
        gpus: names of the GPUs.
        docker: an engine answers.
        ollama: address of an Ollama that answers; None if there is none.
        models: names of the models that Ollama has.
        keys: variables of the environment that hold API keys.
    """

    kafka: str | None = None
    gpus: tuple[str, ...] = ()
    docker: bool = False
    ollama: str | None = None
    models: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def look_around(env: Mapping[str, str] = os.environ) -> Machine:
    """Returns what this machine offers. Waits a few seconds at most for what does not answer."""
    ollama = _ollama_address(env)
    models = _ollama_models(ollama)
    return Machine(
        kafka=variables.BOOTSTRAP.read(env) or (f"{_LOCAL}:{KAFKA_PORT}" if _listens(_LOCAL, KAFKA_PORT) else None),
        gpus=_gpus(),
        docker=_succeeds("docker", "info"),
        ollama=None if models is None else ollama,
        models=models or (),
        keys=tuple(name for name in API_KEYS if env.get(name)),
    )


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _WAIT_S):
            return True
    except OSError:
        return False


def _gpus() -> tuple[str, ...]:
    found = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return tuple(line.strip() for line in (found or "").splitlines() if line.strip())


def _succeeds(*command: str) -> bool:
    return _output(*command) is not None


def _output(*command: str) -> str | None:
    """Returns the output of a program; None if it is missing, fails or hangs."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=_PROGRAM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _ollama_address(env: Mapping[str, str]) -> str:
    named = env.get("OLLAMA_HOST", "") or f"{_LOCAL}:{OLLAMA_PORT}"
    url = named if "://" in named else f"http://{named}"
    # 0.0.0.0 is an address to listen on.
    return url.replace("0.0.0.0", _LOCAL).rstrip("/")


def _ollama_models(url: str) -> tuple[str, ...] | None:
    """Returns the names of the models of an Ollama; None if none answers."""
    try:
        with urllib.request.urlopen(f"{url}/api/tags", timeout=_WAIT_S) as answer:
            return tuple(model["name"] for model in json.load(answer)["models"])
    except (OSError, ValueError, KeyError, TypeError, urllib.error.URLError):
        return None
