"""A program of langgraph, unchanged, as an episode of the environment agent: wall, gateway, join and check."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from schemas.records import Ending, SessionEvent, Verifier
from schemas.tensors import uint8_view
from tentalis.agents.environments import EnvironmentOptions
from tentalis.agents.environments.agent import AgentEnvironment
from tentalis.agents.sandbox import WallMissing, choose_wall
from tentalis.agents.workers.episode_gateway import EpisodeGateway
from tentalis.agents.workers.program_episodes import PlayedProgram, ProgramEpisodes
from tentalis.agents.workers.session_log import SessionLog, SessionStart
from tentalis.rewards.environment_file import DeclaredEnvironment, read_environments
from tentalis.rewards.registry import BUILT_IN, ENVIRONMENTS
from tests.clients.test_programs import PROGRAMS
from tests.support.chat_backend import ChatScript, chat_backend
from tests.support.episode_server import decoded
from tests.support.gateway_lab import Lab, lab, listening
from tests.support.loop_records import task
from tests.support.worker_lab import policy_calls
from tests.unit.agents.test_episodes import served_at

pytestmark = pytest.mark.clients
SECRET = b"a secret of sixteen and more"
ANSWERS = ("a long answer", "not so long", "short")
CHECK = """
import json, pathlib, sys
given = json.load(sys.stdin)
answer = pathlib.Path(given["workspace"], "answer.txt")
print(json.dumps({"reward": float(answer.exists() and answer.read_text() == given["data"]["answer"])}))
"""


class Recorded(SessionLog):
    """The turns that a gateway has recorded."""

    def __init__(self, gateway: Lab) -> None:
        self._gateway = gateway

    def start(self, session_id: str) -> SessionStart:
        return SessionStart(session_id, 0, 1, 0)

    def turns(self, start: SessionStart) -> list[SessionEvent]:
        return [each for each in self._gateway.log.events if each.session_id == start.session_id]


@pytest.fixture
def declared(tmp_path: Path) -> DeclaredEnvironment:
    python = os.environ.get("TENTALIS_CLIENTS")
    if not python:
        pytest.fail("TENTALIS_CLIENTS does not name the interpreter with the client libraries: use make test-clients")
    (tmp_path / "agent").mkdir()
    shutil.copy(PROGRAMS / "langgraph_episode.py", tmp_path / "agent/graph.py")
    (tmp_path / "check.py").write_text(CHECK)
    program = {
        "command": ["{python}", "{folder}/agent/graph.py"],
        "readable": ["agent"],
        "check": ["{python}", "{folder}/check.py"],
        "seconds": 300,
    }
    entry = {"base": "agent", "python": python, "program": program}
    file = tmp_path / "environments.yaml"
    file.write_text(json.dumps({"environments": {"graph": entry}}))
    return read_environments(file, ENVIRONMENTS, BUILT_IN)["graph"]


def played(declared: DeclaredEnvironment, gateway: Lab, max_turns: int) -> tuple[PlayedProgram, Mapping[str, float]]:
    """Plays one episode; returns its turns and its score."""
    episodes = ProgramEpisodes(
        EpisodeGateway(gateway.url), Recorded(gateway), policy_calls(served_at(1), patience_s=1.0), SECRET, "w"
    )
    asked = task(
        "t",
        environment="graph",
        messages=[{"role": "user", "content": "What is the sea?"}],
        verifier=Verifier(name="episode", data='{"answer": "short"}'),
    )

    async def play() -> tuple[PlayedProgram, Mapping[str, float]]:
        environment = AgentEnvironment(EnvironmentOptions(choose_wall, declared=declared))
        try:
            await environment.reset(asked)
            found = await episodes.play(environment, asked, 0, 1, max_turns)
            return found, await environment.score()
        finally:
            await environment.close()

    try:
        return asyncio.run(play())
    except WallMissing as error:
        pytest.skip(str(error))


def test_a_graph_plays_an_episode_whose_turns_are_trained_on(declared: DeclaredEnvironment, tmp_path: Path) -> None:
    script = ChatScript(lambda messages: ANSWERS[len(messages) // 2])
    with (
        listening(chat_backend(script)) as backend,
        lab(tmp_path, backend_url=backend, episode_secret=SECRET) as gateway,
    ):
        gateway.serve(1)
        found, score = played(declared, gateway, 10)
        assert (found.ending, found.left_out, score["reward"]) == (Ending.DONE, 0, 1.0)
        assert found.texts == ANSWERS
        tokens = found.tokens
        own = [token for token, mine in zip(tokens.response, uint8_view(tokens.mask), strict=True) if mine]
        assert decoded(own) == "".join(f"{answer}<|im_end|>" for answer in ANSWERS)
        assert {each["model"] for each in script.bodies} == {"assistant@v1"}

        bounded, score = played(declared, gateway, 2)
        assert (bounded.ending, len(bounded.texts), score["reward"]) == (Ending.TURN_LIMIT, 2, 0.0)
