"""The checks of an episode run once, when it is scored, and have their own time limit."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Ending, Status
from tentalis.agents.environments import EnvironmentOptions
from tentalis.agents.environments.terminal import TerminalEnvironment
from tentalis.agents.environments.terminal_checks import CHECKS
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.policies.served import ServedVersions
from tests.support.episode_server import EpisodeServer
from tests.support.loop_records import T0, ack
from tests.support.worker_lab import policy_calls
from tests.unit.agents.test_terminal import harbor_task, of_folder

ENVIRONMENT_S = 0.5


class SlowChecks:
    """Its command is the checks of an episode: they take `takes_s`, and give the reward 1 if their limit lets them."""

    name = "slow/1"
    readable: Sequence[Path] = ()

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.runs = takes_s, 0

    def run(self, command: Any, folder: Path, limits: Limits, *, stop: threading.Event, **_: Any) -> CommandOutput:
        self.runs += 1
        if stop.wait(min(self.takes_s, limits.time_s)):
            return CommandOutput(b"", b"", CommandEnd.KILLED, None)
        if limits.time_s < self.takes_s:
            return CommandOutput(b"", b"", CommandEnd.TIMED_OUT, None)
        (folder / CHECKS / "logs/verifier/reward.txt").write_text("1")
        return CommandOutput(b"", b"", CommandEnd.EXITED, 0)


@pytest.mark.parametrize(
    ("takes_s", "limit_s", "rewards"),
    [(0.8, 10.0, {"reward": 1.0}), (600.0, 0.8, {"reward": 0.0, "checks_stopped": 1.0})],
)
def test_checks_that_take_longer_than_the_rest_of_the_commands_time(
    tmp_path: Path, takes_s: float, limit_s: float, rewards: dict[str, float]
) -> None:
    wall: Any = SlowChecks(takes_s)
    options = EnvironmentOptions(lambda: wall, tasks=harbor_task(tmp_path, task_toml=f"verifier.timeout_sec={limit_s}"))
    server: Any = EpisodeServer(["assistant@v1"], lambda conversation, turn: "<done>")
    served = ServedVersions("local")
    served.apply(ack(1))
    player = EpisodePlayer(
        server,
        policy_calls(served, patience_s=0.1),
        lambda: TerminalEnvironment(options),
        EpisodeLimits(environment_s=ENVIRONMENT_S),
        worker_id="w",
        server_id="local",
    )
    (result,) = asyncio.run(asyncio.wait_for(player.answer(of_folder(), T0), 60))
    assert (result.status, result.ending, result.error) == (Status.OK, Ending.DONE, None)
    assert result.rewards == {**rewards, "commands": 0.0, "bad_turns": 0.0} and wall.runs == 1
    assert [call.name for call in result.tool_calls] == ["task", "checks"]
