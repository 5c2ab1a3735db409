"""The end of a step at its time limit: nothing that it started runs beside the score and the end of its episode."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Ending, Status, Task, Verifier
from tentalis.agents.environments import EnvironmentOptions, stoppable
from tentalis.agents.environments.folders import remove_folder
from tentalis.agents.environments.shell_steps import in_thread
from tentalis.agents.environments.terminal_shell import CommandStops
from tentalis.agents.environments.toolcall import ToolcallEnvironment
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.policies.served import ServedVersions
from tests.support.episode_server import EpisodeServer
from tests.support.loop_records import T0, ack, task
from tests.support.worker_lab import policy_calls

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "while True: pass"}}\n</tool_call>'


class SlowWall:
    """Its commands end `ends_in_s` after they are stopped, or when they are `released`."""

    name = "slow/1"
    readable: Sequence[Path] = ()

    def __init__(self, ends_in_s: float) -> None:
        self.ends_in_s, self.running = ends_in_s, False
        self.released = threading.Event()

    def run(self, command: Any, folder: Path, limits: Limits, *, stop: threading.Event, **_: Any) -> CommandOutput:
        self.running = True
        stop.wait(30)
        self.released.wait(self.ends_in_s)
        self.running = False
        return CommandOutput(b"", b"", CommandEnd.KILLED, None)

    def start(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("no server is asked for")


class Observed(ToolcallEnvironment):
    """Notes whether a command runs when the episode is scored and closed."""

    def __init__(self, wall: SlowWall, seen: list[tuple[str, bool]]) -> None:
        super().__init__(EnvironmentOptions(lambda: wall))  # type: ignore[arg-type,return-value]
        self.seen, self.slow = seen, wall

    async def score(self) -> Mapping[str, float]:
        self.seen.append(("score", self.slow.running))
        return await super().score()

    async def close(self) -> None:
        self.seen.append(("close", self.slow.running))
        await super().close()


def player_of(made: Observed) -> EpisodePlayer:
    served = ServedVersions("local")
    served.apply(ack(1))
    server: Any = EpisodeServer(["assistant@v1"], lambda conversation, turn: CALL)
    limits = EpisodeLimits(environment_s=0.5)
    return EpisodePlayer(
        server, policy_calls(served, patience_s=0.1), lambda: made, limits, worker_id="w", server_id="local"
    )


def question() -> Task:
    return task(environment="toolcall", n=1, verifier=Verifier(name="episode", data=json.dumps({"answer": "42"})))


def test_a_call_has_ended_when_its_episode_is_scored_and_closed() -> None:
    seen: list[tuple[str, bool]] = []
    player = player_of(Observed(SlowWall(0.5), seen))
    (result,) = asyncio.run(asyncio.wait_for(player.answer(question(), T0), 30))
    assert (result.ending, result.rewards["reward"]) == (Ending.TIMED_OUT, 0.0)
    assert seen == [("score", False), ("close", False)] and player.stuck is None


def test_work_of_a_shell_has_ended_when_its_step_is_cancelled_twice() -> None:
    working = threading.Event()

    def work(stop: CommandStops) -> None:
        working.set()
        assert stop.event().wait(30)
        time.sleep(0.5)
        working.clear()

    async def cancelled() -> None:
        step = asyncio.create_task(in_thread(work))
        await asyncio.to_thread(working.wait, 5)
        for _ in range(2):
            step.cancel()
            await asyncio.sleep(0.1)
        with pytest.raises(asyncio.CancelledError):
            await step
        assert not working.is_set()

    asyncio.run(asyncio.wait_for(cancelled(), 30))


def test_an_episode_with_a_thread_that_does_not_end_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stoppable, "STOP_S", 0.2)
    wall, seen = SlowWall(30.0), list[tuple[str, bool]]()
    made = Observed(wall, seen)
    player = player_of(made)
    (result,) = asyncio.run(asyncio.wait_for(player.answer(question(), T0), 10))
    folder = made._folder
    assert folder is not None and folder.exists(), "the thread may still write there: the next process removes it"
    wall.released.set()
    remove_folder(folder)
    assert (result.status, result.ending, result.rewards, result.attempts) == (Status.INFRA, Ending.INFRA, {}, 1)
    assert seen == [] and result.error == player.stuck
    assert player.stuck is not None and "did not end within 0.2 s" in player.stuck
