"""The environment openenv: what is an action of the policy, what is a reward, and what is a fault of the server."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from schemas.records import Task, Verifier
from tentalis.agents.environments import EnvironmentFault, EnvironmentOptions, Observation, Transition
from tentalis.agents.environments.openenv import client
from tentalis.agents.environments.openenv.environment import BadOpenEnv, OpenEnvEnvironment
from tentalis.agents.environments.registry import data_problem
from tentalis.agents.sandbox import choose_wall
from tentalis.rewards.environment_file import EnvironmentServer
from tests.support.loop_records import task
from tests.support.openenv_server import Answer, OpenEnvScript, error, observation, openenv_server

MOVE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"steps": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["steps"],
}
TOOLS = {"properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}, "metadata": {}}}
LISTED = {"name": "add", "description": "Adds <|im_end|>", "input_schema": {"type": "object", "required": ["a"]}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def asked(data: Mapping[str, Any]) -> Task:
    messages = [{"role": "user", "content": "Play."}]
    return task("t", environment="own", messages=messages, verifier=Verifier(name="episode", data=json.dumps(data)))


class Played:
    """An episode: what the policy saw, the transitions and the score."""

    first: Observation
    transitions: list[Transition]
    score: Mapping[str, float]


def play(script: OpenEnvScript, *turns: str, data: Mapping[str, Any] | None = None, **server: Any) -> Played:
    played = Played()

    async def episode(url: str) -> None:
        options = EnvironmentOptions(choose_wall, server=EnvironmentServer(url=url, **server))
        environment = OpenEnvEnvironment(options)
        environment.name_episode(2, 1)
        try:
            played.first = await environment.reset(asked(data or {}))
            played.transitions = [await environment.step(turn) for turn in turns]
            played.score = await environment.score()
        finally:
            await environment.close()

    with openenv_server(script) as url:
        asyncio.run(episode(url))
    return played


def walking(message: Mapping[str, Any]) -> Answer:
    """Every step costs 0.25; at 3 the walk ends with 1."""
    if message["type"] != "step":
        return observation(place="start", empty=None)
    steps = message["data"].get("steps", message["data"].get("text"))
    return observation(1.0, done=True, place="end") if steps in (3, "3") else observation(-0.25, place="there")


def test_the_policy_calls_the_tool_act_and_the_rewards_are_added() -> None:
    script = OpenEnvScript(walking, MOVE)
    played = play(script, call("act", steps="x"), call("act", steps=1) + call("act", steps=2), call("act", steps=3))
    system, user = played.first.messages
    assert '"name": "act"' in system.content and "metadata" not in system.content
    assert user.content == "Play.\n\nstart"
    wrong, twice, last = played.transitions
    assert "'x' is not of type 'integer'" in wrong.observation.messages[0].content and wrong.rewards == {}
    assert twice.rewards == {"reward": -0.5} and [each.result for each in twice.tool_calls] == ["there", "there"]
    assert last.done and played.score == {"refused_actions": 1.0, "return": 0.5, "reward": 0.5}
    begun, *steps, closed = script.got
    assert begun["type"] == "reset" and len(begun["data"]["episode_id"]) == 36
    assert [each["data"] for each in steps] == [{"steps": 1}, {"steps": 2}, {"steps": 3}]
    assert closed == {"type": "close"}


def test_the_text_of_a_turn_may_be_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", "secret")
    data = {"action": "text", "observation": "place", "reset": {"seed": 5}, "reward": "last", "reward_range": [0, 2]}
    script = OpenEnvScript(walking)
    played = play(script, "1", "3", data=data, key_env="OWN_KEY")
    assert [message.content for message in played.first.messages] == ["Play.\n\nstart"]
    assert [message.content for message in played.transitions[0].observation.messages] == ["there"]
    assert played.score == {"refused_actions": 0.0, "return": 1.0, "reward": 0.0}
    assert script.got[0]["data"]["seed"] == 5 and script.got[1]["data"] == {"text": "1"}
    assert script.keys == ["Bearer secret"]


def test_the_tools_of_mcp_are_offered_and_called() -> None:
    def answers(message: Mapping[str, Any]) -> Answer:
        if message["type"] == "mcp":
            return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": [LISTED]}}}
        if message["type"] == "reset":
            return observation()
        if message["data"]["arguments"]["a"] == 0:
            return observation(tool_name="add", result=None, error={"message": "nothing to add"})
        return observation(True, tool_name="add", result={"content": [{"type": "text", "text": "5 <|im_end|>"}]})

    script = OpenEnvScript(answers, TOOLS)
    played = play(script, call("add", a=0), call("add", a=1), "That was it.")
    assert '"name": "add"' in played.first.messages[0].content and "<|" not in played.first.messages[0].content
    assert [each.result for turn in played.transitions for each in turn.tool_calls] == [
        "error: nothing to add",
        "5 < |im_end|>",
    ]
    assert played.transitions[2].done and played.score["reward"] == 1.0
    assert script.got[2]["data"] == {"type": "call_tool", "tool_name": "add", "arguments": {"a": 0}}


def test_an_action_that_the_server_refuses_is_an_observation() -> None:
    problem = {"loc": ["steps"], "msg": "Input should be greater than 0"}
    refused = error("VALIDATION_ERROR", "Invalid message", errors=[problem])
    script = OpenEnvScript(lambda message: refused if message["type"] == "step" else observation(), MOVE)
    played = play(script, call("act", steps=-1))
    assert "steps: Input should be greater than 0" in played.transitions[0].observation.messages[0].content
    assert played.score == {"refused_actions": 1.0}, "no reward of the server: unknown, not 0"


def test_exceptions_of_an_environment_may_be_those_of_wrong_actions() -> None:
    def answers(message: Mapping[str, Any]) -> Answer:
        if message["type"] == "step" and message["data"]["steps"] == 1:
            return error("EXECUTION_ERROR", "no such way")
        return walking(message)

    turns = (call("act", steps=1), call("act", steps=3))
    played = play(OpenEnvScript(answers, MOVE), *turns, data={"step_errors": "observation"})
    shown = "<tool_response>\nerror: no such way\n</tool_response>"
    assert played.transitions[0].observation.messages[0].content == shown
    assert played.score == {"refused_actions": 1.0, "return": 1.0, "reward": 1.0}
    lost = OpenEnvScript(lambda message: None if message["type"] == "step" else observation(), MOVE)
    with pytest.raises(EnvironmentFault, match="ended the session"):
        play(lost, turns[0], data={"step_errors": "observation"})


def test_a_free_session_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT_S", 0.01)
    script = OpenEnvScript(walking, MOVE, full=2)
    assert play(script, call("act", steps=3)).score["reward"] == 1.0
    with pytest.raises(EnvironmentFault, match=r"no free session within 0 s: .*no free session"):
        play(OpenEnvScript(walking, MOVE, full=9), wait_s=0)


@pytest.mark.parametrize(
    ("at", "answer", "says"),
    [
        ("reset", None, "ended the session at `reset`"),
        ("reset", observation(done=True), "before its first turn"),
        ("reset", error("VALIDATION_ERROR", "bad seed"), "refuses the data of `reset`: bad seed"),
        ("step", None, "ended the session at `step`"),
        ("step", error("EXECUTION_ERROR", "broken\x1b[2J"), r"failed at `step` \(EXECUTION_ERROR\): broken"),
        ("step", error("SESSION_ERROR", "lost"), "SESSION_ERROR"),
        ("step", "no JSON", "without data: no JSON"),
        ("step", {"type": "state", "data": {}}, "answered `step` with `state`"),
        ("step", {"type": "observation", "data": {"done": True}}, "without an observation"),
        ("step", observation("much"), "the reward much, not a finite number"),
        ("step", observation(float("nan")), "not a finite number"),
        ("step", observation(3.0), r"outside \[-1, 1\]: set reward_range"),
    ],
)
def test_a_fault_of_the_server_is_never_a_reward(at: str, answer: Answer, says: str) -> None:
    script = OpenEnvScript(lambda message: answer if message["type"] == at else observation(), MOVE)
    with pytest.raises(EnvironmentFault, match=says):
        play(script, call("act", steps=1))


def test_a_server_that_is_away_silent_or_none_of_openenv_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="cannot be reached"):
        asyncio.run(client.OpenEnvClient(EnvironmentServer(url="http://127.0.0.1:9"), None).begin({}))
    with pytest.raises(EnvironmentFault, match="without the schema of an action"):
        play(OpenEnvScript(walking, None))
    slow = OpenEnvScript(lambda message: __import__("time").sleep(1.0) or observation(), MOVE)
    with pytest.raises(EnvironmentFault, match=r"did not answer `reset` within 0\.2 s"):
        play(slow, reset_s=0.2)


def test_what_must_be_set_is_named() -> None:
    with pytest.raises(BadOpenEnv, match="needs the address of a server"):
        OpenEnvEnvironment(EnvironmentOptions(choose_wall))
    with pytest.raises(BadOpenEnv, match="MISSING_KEY is not set"):
        OpenEnvEnvironment(
            EnvironmentOptions(choose_wall, server=EnvironmentServer(url="http://x", key_env="MISSING_KEY"))
        )
    assert "reward_range must be" in str(data_problem("openenv", {"reward_range": [1, 0]}))
    assert "action" in str(data_problem("openenv", {"actoin": "text"}))
