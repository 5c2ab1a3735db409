"""An episode whose code runs in the image `sandbox`: the environment, and a policy that tries what it must not do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from schemas.records import Message, Task
from tentalis.agents.environments import EnvironmentFault, Observation, Transition
from tentalis.agents.environments.trial.play import play_trial, trial_task
from tests.docker.engine import Docker

# As docs/operations/install.md shows it.
RUN = (
    *("run", "--rm", "--interactive", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--pids-limit", "64", "--memory", "256m"),
)
QUESTION = "Print the sum of the squares of the numbers below 20."
ANSWER = str(sum(number * number for number in range(20)))
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
ATTACKS = """```python
import importlib.util, json, os, socket
tried = {"user": os.getuid(), "product": importlib.util.find_spec("tentalis") is not None}
tried["variables"] = sorted(name for name in os.environ if "TENTALIS" in name)
for name, action in {
    "network": lambda: socket.create_connection(("1.1.1.1", 53), timeout=5),
    "root": lambda: open("/opened", "w"),
    "user 0": lambda: os.setuid(0),
}.items():
    try:
        action()
        tried[name] = "done"
    except OSError as error:
        tried[name] = type(error).__name__
print(json.dumps(tried))
```"""
TURNS = (ATTACKS, "```python\nprint(sum(number * number for number in range(20)))\n```")


class SandboxImage:
    """Runs the code of each turn in a container of an image; the reward is 1 for the right answer, else 0."""

    wall = "docker/test"

    def __init__(self, docker: Docker, image: str) -> None:
        self._docker, self._image, self._output = docker, image, ""
        self.outputs: list[str] = []

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset."""
        return Observation(task.messages)

    async def step(self, action: str) -> Transition:
        """See Environment.step."""
        found = _CODE.search(action)
        if found is None:
            return Transition(Observation((Message(role="user", content="Give the code in a block."),)))
        done = await asyncio.to_thread(self._run, found[1])
        if done.returncode == 125:  # the engine failed, not the code
            raise EnvironmentFault(done.stderr)
        self._output = done.stdout.strip()
        self.outputs.append(self._output or done.stderr)
        said = Message(role="user", content=self.outputs[-1])
        return Transition(Observation((said,)), done=self._output == ANSWER)

    def _run(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", *RUN, self._image, "-"], env=os.environ | self._docker.env,
            input=code, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    async def score(self) -> Mapping[str, float]:
        """See Environment.score."""
        return {"reward": float(self._output == ANSWER)}

    async def close(self) -> None:
        """See Environment.close."""


class Scripted:
    """A policy that gives written turns."""

    def __init__(self, turns: tuple[str, ...]) -> None:
        self._turns = iter(turns)

    async def turn(self, messages: list[dict[str, str]]) -> str | None:
        """See TurnPlayer.turn."""
        return next(self._turns, None)


def play(docker: Docker, image: str) -> tuple[dict[str, Any], str]:
    """Plays an episode; returns what the policy's attacks achieved, and the line with the score."""
    environment, shown = SandboxImage(docker, image), list[str]()
    task = trial_task("sandbox-image", QUESTION, "{}")
    play_trial(lambda: environment, task, Scripted(TURNS), len(TURNS), shown.append)
    return json.loads(environment.outputs[0]), shown[-1]


def problems(docker: Docker, image: str) -> list[str]:
    """Plays an episode; returns what went wrong in it, or was not confined."""
    wanted = {"user": 10001, "product": False, "variables": [], "network": "OSError", "root": "OSError"}
    wanted["user 0"] = "PermissionError"
    tried, score = play(docker, image)
    found = [f"an episode in {image}: {name} is {tried[name]!r}" for name in wanted if tried[name] != wanted[name]]
    return found + ([] if score == "[score] reward 1" else [f"an episode in {image}: {score}"])
