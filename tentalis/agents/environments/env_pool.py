"""The environment env-pool: episodes on a pool of environments that another process or machine offers over HTTP.

The policy calls the tools that the pool lists, in the format of Qwen and Hermes. A turn without a call is the answer
and ends the episode; the pool scores it. A pool that is away or has lost the lease is an infrastructure fault.
The verifier's data are `EnvPoolData`. The contract: docs/reference/env-pool.md.
"""

import json
import math
import os
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, JsonValue

from schemas.ids import derived_id
from schemas.records import Message, Task, ToolCall
from tentalis.agents.environments.episode_task import episode_data
from tentalis.agents.environments.pool_client import PoolClient, PoolFault
from tentalis.agents.environments.protocol import EnvironmentOptions, Observation, Transition
from tentalis.agents.environments.tool_turns import SHOWN_CHARACTERS, after_calls, call_problem, with_tools
from tentalis.agents.environments.tools import schema_problem
from tentalis.rewards.environment_file import EnvironmentServer
from tentalis.rewards.verdict import VerifierData
from tentalis.service import variables
from tentalis.text.tool_calls import RequestedCall, requested_calls
from tentalis.text.tool_output import head_and_tail, readable_text

UNKNOWN_WALL = "env-pool"
"""The wall of a pool that does not name its own."""
ANSWER_S = 30.0
"""Seconds for the answer of a score after its time limit in the pool, so that the pool says what it means."""


class BadPool(ValueError):
    """The environment env-pool without a usable server or key; the message says what to set."""


class EnvPoolData(VerifierData):
    """The task of the pool by its name; without it, the user's message says it. `meta`: further keys of `task_meta` for
    the pool. `centred`: the reward is 2 * score - 1, as OpenClaw-RL trains, else the score. All other keys are the data
    of the pool's own environment (`task_meta.data`), such as the `answer` of toolcall."""

    model_config = ConfigDict(frozen=True, extra="allow")

    task: str | None = None
    meta: Mapping[str, JsonValue] = Field(default_factory=dict)
    centred: bool = False


class EnvPoolEnvironment:
    """See the module docstring. Raises BadPool."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._server = _server_of(options)
        self._key = _key_of(self._server)
        self._episode: tuple[int, int] | None = None
        self._client: PoolClient | None = None
        self._data = EnvPoolData()
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._answer: str | None = None
        self._calls = self._refused = 0
        self._begun: Mapping[str, Any] = {}

    @property
    def wall(self) -> str:
        """See Environment.wall: the pool's; UNKNOWN_WALL if it does not name one."""
        wall = self._begun.get("wall", UNKNOWN_WALL)
        return wall if isinstance(wall, str) else UNKNOWN_WALL

    @property
    def score_s(self) -> float:
        """See LimitsScore: the time limit of the pool's score, as far as it is known, and its way here."""
        given = self._begun.get("score_s")
        if isinstance(given, bool) or not isinstance(given, int | float):
            return self._server.evaluate_s
        return max(float(given) + ANSWER_S, self._server.evaluate_s)

    def name_episode(self, sample: int, attempt: int) -> None:
        """See NamesEpisode: the successor of a killed worker gets the lease that the first attempt of the sample had. A
        further attempt has its own, so that two workers do not take it from each other."""
        self._episode = (sample, attempt)

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages, with the pool's tools in the system message and its text of the
        task as the last one."""
        self._answer, self._calls, self._refused = None, 0, 0
        self._data = episode_data(task, EnvPoolData)
        self._client = PoolClient(self._server, self._key)
        named = uuid.uuid4().hex if self._episode is None else derived_id("episode", task.task_id, *self._episode)
        await self._client.allocate(self._data.task or task.task_id, named)
        self._begun = await self._client.reset(self._task_meta(task))
        signatures, self._parameters = _offered(self._begun)
        asked = self._begun.get("user_msg")
        if not isinstance(asked, str) or not asked.strip():
            raise PoolFault(f"{self._server.url}/reset answered without a user_msg")
        messages = (*task.messages[:-1], Message(role="user", content=readable(asked)))
        return Observation(with_tools(messages, signatures) if signatures else messages)

    def _task_meta(self, task: Task) -> dict[str, Any]:
        named = {} if self._data.task is None else {"task_name": self._data.task}
        said = {"instruction": task.messages[-1].content, "data": self._data.model_extra or {}}
        return {**said, **named, **self._data.meta}

    async def step(self, action: str) -> Transition:
        """See Environment.step. When it is cancelled the connection is closed, at which `tentalis serve env-pool` stops
        the call; another pool may finish it before it scores."""
        requested = requested_calls(action)
        if not requested:
            self._answer = action
            return Transition(done=True)
        made: list[ToolCall] = []
        rewards: dict[str, float] = {}
        done = False
        for number, call in enumerate(requested):
            problem = "the episode is over" if done else call_problem(call, number, self._parameters)
            if problem is not None:
                self._refused += 1
                output = head_and_tail(readable(f"error: {problem}"), SHOWN_CHARACTERS)
            else:
                output, over = await self._carried_out(call, rewards)
                done = done or over
            made.append(ToolCall(name=call.name or "?", arguments=json.dumps(dict(call.arguments)), result=output))
        if done:
            return Transition(rewards=rewards, done=True, tool_calls=tuple(made))
        return Transition(after_calls(made), rewards, tool_calls=tuple(made))

    async def _carried_out(self, call: RequestedCall, rewards: dict[str, float]) -> tuple[str, bool]:
        """Returns the output of a call, and True if it ended the episode; adds its parts of the reward."""
        assert self._client is not None, "step before reset"
        self._calls += 1
        answer = await self._client.exec_tool(call.name, call.arguments)
        for name, value in _numbers(answer.get("rewards", {}), "exec_tool").items():
            rewards[name] = rewards.get(name, 0.0) + value
        text = readable(str(answer.get("observation", ""))).strip()
        return head_and_tail(text, SHOWN_CHARACTERS) or "[no output]", answer.get("done") is True

    async def score(self) -> Mapping[str, float]:
        """See Environment.score: the pool's score and its parts. A score of null is unknown."""
        assert self._client is not None, "score before reset"
        answer = await self._client.evaluate(self._answer, self.score_s)
        parts = {"calls": float(self._calls)} | _numbers(answer.get("rewards", {}), "evaluate")
        parts["refused_calls"] = parts.get("refused_calls", 0.0) + self._refused
        if "score" not in answer:
            raise PoolFault(f"{self._server.url}/evaluate answered without a score")
        if answer["score"] is None:
            return parts
        score = _numbers({"score": answer["score"]}, "evaluate")["score"]
        reward = 2.0 * score - 1.0 if self._data.centred else score
        if abs(reward) > 1.0:
            raise PoolFault(
                f"{self._server.url}/evaluate answered the score {score:g}, which makes the reward {reward:g}, outside "
                "[-1, 1]"
            )
        return {**parts, "score": score, "reward": reward}

    async def close(self) -> None:
        """See Environment.close: gives the lease back."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _server_of(options: EnvironmentOptions) -> EnvironmentServer:
    if options.server is not None:
        return options.server
    url = variables.ENV_POOL.read()
    if url is None:
        raise BadPool(
            f"the environment env-pool needs the address of a pool: set {variables.ENV_POOL.name}, or `server: {{url: "
            "http://HOST:PORT}` of an environment with the base env-pool in the file of environments"
        )
    if "@" in url:
        raise BadPool(f"{variables.ENV_POOL.name} holds credentials: set the key in {variables.ENV_POOL_KEY.name}")
    return EnvironmentServer(url=url)


def _key_of(server: EnvironmentServer) -> str | None:
    if server.key_env is None:
        return variables.ENV_POOL_KEY.read()
    key = os.environ.get(server.key_env)
    if not key:
        raise BadPool(f"the key of the pool {server.url}: the variable {server.key_env} is not set")
    return key


def _offered(begun: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Returns the tools of a pool as prompts list them, and the JSON schema of the arguments of each. Raises
    PoolFault."""
    listed = begun.get("tool_schemas", [])
    shown: list[Mapping[str, Any]] = []
    parameters: dict[str, Mapping[str, Any]] = {}
    for each in listed if isinstance(listed, list) else [listed]:
        function = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        schema = function.get("parameters") or {"type": "object"} if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(schema, dict):
            raise PoolFault(f"the pool lists a tool that is not of the form of OpenAI's API: {str(each)[:200]}")
        if name in parameters:
            raise PoolFault(f"the pool lists two tools named {name[:200]}")
        if (problem := schema_problem(schema)) is not None:
            raise PoolFault(f"the parameters of the pool's tool {name[:200]} {problem}")
        shown.append(json.loads(readable(json.dumps(each))))
        parameters[name] = schema
    return shown, parameters


def readable(text: str) -> str:
    """Returns a text of a pool without control characters, and with `<|` as `< |`."""
    return readable_text(text.encode("utf-8", errors="replace"))


def _numbers(parts: object, path: str) -> dict[str, float]:
    """Returns numbers by name. Raises PoolFault."""
    if not isinstance(parts, dict):
        raise PoolFault(f"the pool's answer to {path} has rewards that are no JSON object")
    for name, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PoolFault(f"the pool's answer to {path} has {name[:200]!r}: {str(value)[:200]}, not a finite number")
    return {name: float(value) for name, value in parts.items()}
