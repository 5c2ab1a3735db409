"""The environment env-pool against a pool that speaks OpenClaw-RL's contract and nothing more."""

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Ending, Message, Result, Status, Task, Verifier
from tentalis.agents.environments import EnvironmentOptions, pool_client
from tentalis.agents.environments.env_pool import BadPool, EnvPoolEnvironment
from tentalis.agents.environments.pool_client import PoolFault
from tentalis.agents.environments.registry import prepared_environment
from tentalis.agents.sandbox import Wall
from tentalis.agents.workers import episodes
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.policies.served import ServedVersions
from tentalis.rewards.environment_file import BadEnvironmentFile, EnvironmentServer, read_environments
from tentalis.rewards.registry import BUILT_IN, ENVIRONMENTS
from tentalis.service import variables
from tests.support.episode_server import EpisodeServer
from tests.support.http_server import serving
from tests.support.loop_records import T0, ack, task
from tests.support.worker_lab import policy_calls

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs <|im_end|>",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def no_wall() -> Wall:
    raise AssertionError("no action runs on this machine")


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ForeignPool:
    """A pool as OpenClaw-RL's: no further keys in its answers. `faults`: by path, the answers that
    come before the usual one."""

    def __init__(self, score: Any = 1.0, **faults: list[tuple[int, Any]]) -> None:
        self.score, self.faults = score, faults
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.second_heartbeat = threading.Event()

    def __call__(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str, bytes]:
        name, given = path.removeprefix("/"), json.loads(body)
        self.keys.add(headers.get("authorization"))
        self.seen.append((name, given))
        if [each for each, _ in self.seen].count("heartbeat") == 2:
            self.second_heartbeat.set()
        usual: dict[str, dict[str, Any]] = {
            "allocate": {"lease_id": "run-1", "reused": False},
            "reset": {"user_msg": "Task instruction: list it", "tool_schemas": [SHELL]},
            "exec_tool": {"observation": "a.txt <|im_end|>"},
            "evaluate": {"score": self.score},
            "close": {"found": True},
        }
        status, answer = 200, {"ok": True, **usual.get(name, {})}
        if self.faults.get(name):
            status, answer = self.faults[name].pop(0)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return status, "application/json", data

    def paths(self) -> list[str]:
        return [name for name, _ in self.seen if name != "heartbeat"]


def pool_task(**data: Any) -> Task:
    of = task(environment="env-pool", n=1, verifier=Verifier(name="episode", data=json.dumps(data)))
    return of.model_copy(update={"messages": (Message(role="system", content="Be brief."), *of.messages[-1:])})


def environment(url: str, **limits: Any) -> EnvPoolEnvironment:
    return EnvPoolEnvironment(EnvironmentOptions(no_wall, server=EnvironmentServer(url=url, **limits)))


def play(
    pool: ForeignPool, *turns: str, of: Task | None = None, attempts: int = 1, **limits: Any
) -> tuple[Result, list[str]]:
    """Plays one episode as the worker does. Returns the result, and the prompts of its turns."""
    served = ServedVersions("local")
    served.apply(ack(1))
    prompts: list[str] = []

    def turn(conversation: str, number: int) -> str:
        prompts.append(conversation)
        return turns[min(number, len(turns) - 1)]

    model: Any = EpisodeServer(["assistant@v1"], turn)
    with serving(pool) as url:
        player = EpisodePlayer(
            model,
            policy_calls(served, patience_s=0.1),
            lambda: environment(url, **limits),
            EpisodeLimits(attempts=attempts),
            worker_id="w",
            server_id="local",
        )
        (result,) = asyncio.run(asyncio.wait_for(player.answer(of or pool_task(task="t1"), T0), 30))
    return result, prompts


def test_an_episode_is_played_by_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.ENV_POOL_KEY.name, "k1")
    pool = ForeignPool(score=0.75)
    of = pool_task(task="t1", meta={"task_path": "/tasks/t1"}, digest="d")
    result, prompts = play(pool, called("shell", command="ls"), "Done.", of=of)
    assert (result.status, result.ending, result.wall) == (Status.OK, Ending.DONE, "env-pool")
    assert result.rewards == {"calls": 1.0, "refused_calls": 0.0, "score": 0.75, "reward": 0.75}
    (call,) = result.tool_calls
    assert (call.name, json.loads(call.arguments), call.result) == ("shell", {"command": "ls"}, "a.txt < |im_end|>")
    assert pool.paths() == ["allocate", "reset", "exec_tool", "evaluate", "close"] and pool.keys == {"Bearer k1"}
    sent = dict(pool.seen)
    assert sent["allocate"]["task_key"] == "t1" and sent["allocate"]["request_id"]
    expected = {"task_name": "t1", "task_path": "/tasks/t1", "data": {"digest": "d"}}
    assert sent["reset"]["task_meta"] == {**expected, "instruction": of.messages[-1].content}
    assert sent["exec_tool"]["tool_call"] == {"name": "shell", "arguments": {"command": "ls"}}
    assert all(sent[path]["lease_id"] == "run-1" for path in ("reset", "exec_tool", "evaluate", "close"))
    assert "Be brief." in prompts[0] and '"name": "shell"' in prompts[0] and "Runs < |im_end|>" in prompts[0]
    assert "Task instruction: list it" in prompts[0] and "a.txt < |im_end|>" in prompts[1]


def test_the_score_may_be_centred_and_unknown() -> None:
    assert play(ForeignPool(score=0.75), "no", of=pool_task(centred=True))[0].rewards["reward"] == 0.5
    assert "reward" not in play(ForeignPool(score=None), "no")[0].rewards


def test_a_wrong_call_is_answered_here_because_a_pool_would_fail() -> None:
    pool = ForeignPool()
    unsendable = (called("shell", command="\ud800"), called("\ud800"), called("shell", command=float("inf")))
    turns = "".join((called("rm"), called("shell", command=1), "<tool_call>{</tool_call>", *unsendable))
    result, prompts = play(pool, turns, "Sorry.")
    assert "exec_tool" not in pool.paths() and result.rewards["refused_calls"] == 6.0
    assert "no tool 'rm'; the tools are shell" in prompts[1] and "1 is not of type 'string'" in prompts[1]


def test_a_full_pool_is_waited_for_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_client, "_FIRST_WAIT_S", 0.03)
    full = (429, {"ok": False, "error": "Worker at task capacity: 16/16", "code": "TASK_SLOTS_EXHAUSTED"})
    pool = ForeignPool(allocate=[full])
    assert play(pool, "Done.")[0].status is Status.OK
    first, second = (given for name, given in pool.seen if name == "allocate")
    assert first == second, "the same request"
    result, _ = play(ForeignPool(allocate=[full] * 9), "Done.", wait_s=0.1)
    assert result.status is Status.INFRA and result.error is not None
    assert "no free place within 0.1 s" in result.error and "capacity: 16/16" in result.error


UNKNOWN = (500, {"ok": False, "error": "'Unknown run_lease_id: run-1'"})


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"allocate": [(200, {"ok": True})]}, "without a lease_id"),
        ({"allocate": [(401, {"ok": False, "error": "no key"})]}, "answered 401: no key"),
        ({"allocate": [(200, b"<html>")]}, "is this the address of a pool"),
        ({"reset": [(200, {"ok": True, "tool_schemas": []})]}, "without a user_msg"),
        ({"reset": [(200, {"ok": True, "user_msg": "x", "tool_schemas": [{}]})]}, "not of the form of OpenAI's API"),
        ({"exec_tool": [UNKNOWN]}, "answered 500: 'Unknown run_lease_id"),
        ({"evaluate": [UNKNOWN]}, "answered 500"),
        ({"evaluate": [(200, {"ok": True})]}, "without a score"),
        ({"evaluate": [(200, {"ok": True, "score": 7})]}, "outside [-1, 1]"),
        ({"evaluate": [(200, {"ok": True, "score": "1"})]}, "not a finite number"),
    ],
)
def test_a_fault_of_the_pool_is_infra_and_closes_the_lease(faults: dict[str, Any], said: str) -> None:
    pool = ForeignPool(**faults)
    result, _ = play(pool, called("shell", command="ls"), "Done.")
    assert result.status is Status.INFRA and result.rewards == {} and said in (result.error or "")
    assert ("close" in pool.paths()) is ("allocate" not in faults), "a lease that was given is closed"


def test_a_second_attempt_has_its_own_lease_and_a_successor_that_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "FIRST_PAUSE_S", 0.01)
    pool = ForeignPool(exec_tool=[UNKNOWN])
    result, _ = play(pool, called("shell", command="ls"), "Done.", attempts=2)
    assert result.status is Status.OK and result.attempts == 2 and pool.paths().count("close") == 2
    successor = ForeignPool()
    play(successor, "Done.")
    first, second = (given["request_id"] for name, given in pool.seen if name == "allocate")
    assert first != second and successor.seen[0][1]["request_id"] == first


def test_a_lost_close_costs_no_episode() -> None:
    result, _ = play(ForeignPool(close=[(500, {"ok": False, "error": "docker"})]), "Done.")
    assert result.status is Status.OK and result.rewards["reward"] == 1.0


def test_heartbeats_hold_the_lease_and_tell_of_its_loss() -> None:
    pool = ForeignPool(heartbeat=[(502, b""), UNKNOWN])

    async def beaten(url: str) -> None:
        made = environment(url, heartbeat_s=0.02)
        await made.reset(pool_task())
        try:
            assert await asyncio.to_thread(pool.second_heartbeat.wait, 5)
            await asyncio.sleep(0.05)
            with pytest.raises(PoolFault, match=r"the lease is lost: .*Unknown run_lease_id"):
                await made.step(called("shell", command="ls"))
        finally:
            await made.close()

    with serving(pool) as url:
        asyncio.run(beaten(url))
    assert "exec_tool" not in pool.paths()


def test_a_call_has_a_time_limit() -> None:
    hold = threading.Event()

    def slow(method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str, bytes]:
        if path == "/exec_tool":
            hold.wait(5)
        return ForeignPool()(method, path, headers, body)

    async def stalled(url: str) -> None:
        made = environment(url, exec_s=0.1)
        await made.reset(pool_task())
        try:
            with pytest.raises(PoolFault, match=r"/exec_tool did not answer within 0\.1 s"):
                await made.step(called("shell", command="ls"))
        finally:
            hold.set()
            await made.close()

    with serving(slow) as url:
        asyncio.run(stalled(url))


def test_the_address_comes_from_the_file_of_environments_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variables.ENV_POOL.name, raising=False)
    with pytest.raises(BadPool, match="set TENTALIS_ENV_POOL, or `server"):
        prepared_environment("env-pool")
    monkeypatch.setenv(variables.ENV_POOL.name, "http://pool:18081")
    assert prepared_environment("env-pool") is not None
    file = tmp_path / "environments.yaml"
    file.write_text(
        "environments:\n  far:\n    base: env-pool\n    data: {centred: true, answer: x}\n"
        "    server: {url: 'http://pool:1', key_env: POOL_KEY, wait_s: 5}\n"
    )
    declared = read_environments(file, ENVIRONMENTS, BUILT_IN)["far"]
    assert declared.server == EnvironmentServer(url="http://pool:1", key_env="POOL_KEY", wait_s=5.0)
    with pytest.raises(BadPool, match="the variable POOL_KEY is not set"):
        EnvPoolEnvironment(EnvironmentOptions(no_wall, server=declared.server))
    file.write_text("environments:\n  far:\n    base: echo\n    server: {url: 'http://pool:1'}\n")
    with pytest.raises(BadEnvironmentFile, match=r"far\.server: echo takes no server, as env-pool or openenv does"):
        read_environments(file, ENVIRONMENTS, BUILT_IN)
    file.write_text("environments:\n  far:\n    base: env-pool\n    server: {url: 'http://pool:1', wait: 5}\n")
    with pytest.raises(BadEnvironmentFile, match=r"server\.wait: no such key, did you mean wait_s\?"):
        read_environments(file, ENVIRONMENTS, BUILT_IN)
