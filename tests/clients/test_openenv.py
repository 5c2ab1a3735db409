"""Episodes on servers of OpenEnv's own package, which `make test-openenv` installs in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
import pytest

from schemas.records import Verifier
from tentalis.agents.environments import EnvironmentFault, EnvironmentOptions, Transition
from tentalis.agents.environments.openenv.environment import OpenEnvEnvironment
from tentalis.agents.sandbox import choose_wall
from tentalis.local.ports import free_port
from tentalis.rewards.environment_file import EnvironmentServer
from tests.clients.test_programs import PROGRAMS
from tests.support.loop_records import task

pytestmark = pytest.mark.clients
START_S = 300.0
Start = Callable[[str], EnvironmentServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server of a game with one session."""
    python = os.environ.get("TENTALIS_OPENENV")
    if not python:
        pytest.skip("TENTALIS_OPENENV does not name the interpreter with OpenEnv's package: use make test-openenv")
    servers: list[subprocess.Popen[bytes]] = []

    def started(game: str) -> EnvironmentServer:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        servers.append(subprocess.Popen([python, str(PROGRAMS / "openenv_server.py"), game, str(port), "1"]))
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and servers[-1].poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    return EnvironmentServer(url=url, wait_s=30.0)
            time.sleep(0.2)
        pytest.fail("the server did not start")

    yield started
    for server in servers:
        server.kill()
        server.wait()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def seen(transition: Transition) -> str:
    return " ".join(message.content for message in transition.observation.messages)


async def played(
    server: EnvironmentServer, data: Mapping[str, Any], *turns: str
) -> tuple[list[Transition], Mapping[str, float]]:
    """Plays one episode."""
    environment = OpenEnvEnvironment(EnvironmentOptions(choose_wall, server=server))
    messages = [{"role": "user", "content": "Play."}]
    verifier = Verifier(name="episode", data=json.dumps(data))
    try:
        await environment.reset(task("t", environment="own", messages=messages, verifier=verifier))
        return [await environment.step(turn) for turn in turns], await environment.score()
    finally:
        await environment.close()


def test_an_action_with_fields_is_a_tool_call(start: Start) -> None:
    server = start("guess")
    data = {"reset": {"seed": 5}}
    turns, score = asyncio.run(played(server, data, call("act", value="x"), call("act", value=3), call("act", value=5)))
    assert "'x' is not of type 'integer'" in seen(turns[0]) and "higher" in seen(turns[1])
    assert [turn.done for turn in turns] == [False, False, True]
    assert score == {"refused_actions": 1.0, "return": 0.9, "reward": 0.9}
    with pytest.raises(EnvironmentFault, match="the game is broken"):
        asyncio.run(played(server, data, call("act", value=666)))


def test_an_action_of_one_text_is_the_turn_and_sessions_wait_for_a_place(start: Start) -> None:
    server = start("say")
    data = {"action": "message", "observation": "text"}

    async def two() -> list[tuple[list[Transition], Mapping[str, float]]]:
        return await asyncio.gather(played(server, data, "8", "7"), played(server, data, "7"))

    (first, second) = asyncio.run(two())
    assert [seen(turn) for turn in first[0]] == ["lower", ""] and first[1]["reward"] == 0.9
    assert second[1]["reward"] == 1.0


def test_the_tools_of_an_environment_of_mcp_are_called(start: Start) -> None:
    turns, score = asyncio.run(played(start("calculate"), {}, call("multiply", a=6, b=6), call("multiply", a=6, b=7)))
    assert "<tool_response>\n36\n</tool_response>" in seen(turns[0])
    assert turns[1].done and score["reward"] == 1.0
