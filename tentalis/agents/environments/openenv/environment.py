"""The environment openenv: an environment of OpenEnv, which its own server plays, unchanged.

The policy acts in one of three ways. With `action` in the data, the text of a turn is that field of the server's
action. Without it, the policy calls tools in the format of Qwen and Hermes: those of the server, if it is an
environment of MCP, else the tool `act`, whose arguments are the server's action. A turn without a call then ends the
episode. The server gives the rewards. A server that is away, is full or fails is an infrastructure fault.
"""

import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from schemas.ids import derived_id
from schemas.records import Message, Task, ToolCall
from tentalis.agents.environments.episode_task import episode_data
from tentalis.agents.environments.openenv.client import InvalidAction, OpenEnvClient, OpenEnvFault, StepFailed
from tentalis.agents.environments.protocol import EnvironmentOptions, Observation, Transition
from tentalis.agents.environments.tool_turns import SHOWN_CHARACTERS, after_calls, call_problem, with_tools
from tentalis.agents.environments.tools import schema_problem, signature
from tentalis.rewards.environment_file import EnvironmentServer
from tentalis.rewards.verdict import VerifierData
from tentalis.text.tool_calls import RequestedCall, requested_calls
from tentalis.text.tool_output import head_and_tail, readable_text

WALL = "openenv"
"""The wall of the actions: that of the server, which does not name it."""
ACT = "act"
_KEPT = ("type", "required", "$defs", "additionalProperties")
_ROUNDING = 1e-6


class BadOpenEnv(ValueError):
    """The environment openenv without a usable server or key; the message says what to set."""


class OpenEnvData(VerifierData):
    """`action`: the field of the server's action that is the text of a turn; None: the policy calls tools. `reset`:
    arguments of the server's `reset`, such as `seed`. `observation`: the field of the server's observations that the
    policy sees; None: all. `step_errors`: an exception of the environment in a step is a fault of the server, or an
    observation, because wrong actions raise it. `reward`: the sum of the rewards of the steps, or the last one.
    `reward_range`: the lowest and the highest reward of an episode, which are mapped to [-1, 1]."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: str | None = None
    reset: Mapping[str, JsonValue] = Field(default_factory=dict)
    observation: str | None = None
    step_errors: Literal["fault", "observation"] = "fault"
    reward: Literal["sum", "last"] = "sum"
    reward_range: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError("reward_range must be the lowest and a higher reward")
        return self


class OpenEnvEnvironment:
    """See the module docstring. Raises BadOpenEnv."""

    def __init__(self, options: EnvironmentOptions) -> None:
        if options.server is None:
            raise BadOpenEnv(
                "the environment openenv needs the address of a server: declare one with `base: openenv` and `server: "
                "{url: http://HOST:PORT}` in a file of environments"
            )
        self._server = options.server
        self._key = _key_of(self._server)
        self._episode: tuple[int, int] | None = None
        self._client: OpenEnvClient | None = None
        self._data = OpenEnvData()
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._of_mcp = False
        self._rewards: list[float] = []
        self._refused = 0

    @property
    def wall(self) -> str:
        """See Environment.wall."""
        return WALL

    def name_episode(self, sample: int, attempt: int) -> None:
        """See NamesEpisode: the server gets the name of the episode as `episode_id`."""
        self._episode = (sample, attempt)

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages, with the server's first observation after the last one."""
        self._rewards, self._refused = [], 0
        self._data = episode_data(task, OpenEnvData)
        client = self._client = OpenEnvClient(self._server, self._key)
        named = uuid.uuid4().hex if self._episode is None else derived_id("episode", task.task_id, *self._episode)
        begun = await client.begin({"episode_id": named, **self._data.reset})
        if begun.get("done") is True:
            raise OpenEnvFault(f"{self._server.url} ended the episode before its first turn")
        shown = self._seen(begun)
        asked = task.messages[-1].content
        last = Message(role="user", content=f"{asked}\n\n{shown}" if shown else asked)
        messages = (*task.messages[:-1], last)
        if self._data.action is not None:
            return Observation(messages)
        return Observation(with_tools(messages, await self._offered(client)))

    async def _offered(self, client: OpenEnvClient) -> list[dict[str, Any]]:
        """Returns the tools as prompts list them, and keeps the schema of the arguments of each."""
        schema = await client.action_schema()
        properties = {name for name in schema.get("properties", {}) if name != "metadata"}
        self._of_mcp = properties <= {"type"} or {"tool_name", "arguments"} <= properties
        if self._of_mcp:
            tools = [_tool(each) for each in await client.tools()]
        else:
            tools = [(ACT, "Takes an action in the environment.", _without_metadata(schema))]
        self._parameters = {}
        for name, _, parameters in tools:
            _check(name, parameters, self._parameters)
            self._parameters[name] = parameters
        listed = [signature(name, described, parameters) for name, described, parameters in tools]
        return [dict(json.loads(readable(json.dumps(each)))) for each in listed]

    async def step(self, action: str) -> Transition:
        """See Environment.step. When it is cancelled, the session ends with `close`."""
        if self._data.action is not None:
            shown, reward, done = await self._acted({self._data.action: action})
            seen = () if done else (Message(role="user", content=shown or "[nothing]"),)
            return Transition(Observation(seen), _parts(reward), done=done)
        requested = requested_calls(action)
        if not requested:
            return Transition(done=True)
        made: list[ToolCall] = []
        rewards: list[float] = []
        done = False
        for number, call in enumerate(requested):
            problem = "the episode is over" if done else call_problem(call, number, self._parameters)
            if problem is not None:
                self._refused += 1
                output = readable(f"error: {problem}")
            else:
                output, reward, done = await self._acted(self._action(call))
                rewards += [] if reward is None else [reward]
            shown = head_and_tail(output, SHOWN_CHARACTERS) or "[no output]"
            made.append(ToolCall(name=call.name or "?", arguments=json.dumps(dict(call.arguments)), result=shown))
        observation = Observation(()) if done else after_calls(made)
        parts = _parts(sum(rewards) if rewards else None)
        return Transition(observation, parts, done=done, tool_calls=tuple(made))

    def _action(self, call: RequestedCall) -> Mapping[str, Any]:
        if self._of_mcp:
            return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        return dict(call.arguments)

    async def _acted(self, action: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Takes an action. Returns what the policy sees, the reward if there is one, and True at the end."""
        assert self._client is not None, "step before reset"
        try:
            answer = await self._client.step(action)
        except (InvalidAction, StepFailed) as error:
            if isinstance(error, StepFailed) and self._data.step_errors == "fault":
                raise
            self._refused += 1
            return readable(f"error: {error.said}"), None, False
        reward = answer.get("reward")
        if reward is not None:
            if not isinstance(reward, bool | int | float) or not math.isfinite(reward):
                raise OpenEnvFault(f"{self._server.url} gave the reward {str(reward)[:200]}, not a finite number")
            reward = float(reward)
            self._rewards.append(reward)
        return self._seen(answer), reward, answer.get("done") is True

    def _seen(self, answer: Mapping[str, Any]) -> str:
        """Returns an observation as the policy sees it: one field as it is, several as JSON without empty ones."""
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            raise OpenEnvFault(f"{self._server.url} answered without an observation")
        field = self._data.observation
        if field is not None and field not in observation:
            raise OpenEnvFault(
                f"the observations of {self._server.url} have no field {field!r}: they have {', '.join(observation)}"
            )
        if field is not None:
            found = observation[field]
        else:
            found = _mcp_result(observation) if self._of_mcp and "tool_name" in observation else _whole(observation)
        text = "" if found is None else found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        return head_and_tail(readable(text).strip(), SHOWN_CHARACTERS)

    async def score(self) -> Mapping[str, float]:
        """See Environment.score. Without a reward of the server there is no `reward`."""
        parts = {"refused_actions": float(self._refused)}
        if not self._rewards:
            return parts
        total = sum(self._rewards) if self._data.reward == "sum" else self._rewards[-1]
        return {**parts, "return": total, "reward": self._mapped(total)}

    def _mapped(self, reward: float) -> float:
        """Returns a reward in [-1, 1]. Raises OpenEnvFault."""
        low, high = self._data.reward_range or (-1.0, 1.0)
        slack = _ROUNDING * (high - low)
        if not low - slack <= reward <= high + slack:
            raise OpenEnvFault(
                f"the reward of {self._server.url} is {reward:g}, outside [{low:g}, {high:g}]: set reward_range in the "
                "data of the environment to its lowest and highest reward; it is mapped to [-1, 1]"
            )
        mapped = reward if self._data.reward_range is None else 2.0 * (reward - low) / (high - low) - 1.0
        return min(1.0, max(-1.0, mapped))

    async def close(self) -> None:
        """See Environment.close: ends the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _key_of(server: EnvironmentServer) -> str | None:
    if server.key_env is None:
        return None
    key = os.environ.get(server.key_env)
    if not key:
        raise BadOpenEnv(f"the key of the server {server.url}: the variable {server.key_env} is not set")
    return key


def _tool(listed: Any) -> tuple[str, str, Mapping[str, Any]]:
    """Returns name, description and schema of the arguments of a tool of MCP. Raises OpenEnvFault."""
    given = listed if isinstance(listed, dict) else {}
    name, schema = given.get("name"), given.get("inputSchema") or given.get("input_schema") or {"type": "object"}
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise OpenEnvFault(f"the server lists a tool without a name or a schema: {str(listed)[:200]}")
    return name, str(given.get("description") or ""), schema


def _without_metadata(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of an action without the field that OpenEnv adds to each."""
    properties = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
    kept = {name: each for name, each in schema.items() if name in _KEPT}
    return {"type": "object", **kept, "properties": properties}


def _check(name: str, parameters: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises OpenEnvFault for a tool that cannot be offered."""
    if name in others:
        raise OpenEnvFault(f"the server lists two tools named {name[:200]}")
    if (problem := schema_problem(parameters)) is not None:
        raise OpenEnvFault(f"the parameters of the server's tool {name[:200]} {problem}")


def _whole(observation: Mapping[str, Any]) -> Any:
    """Returns an observation without its empty fields; of one text alone, that text; None of an empty one."""
    kept = {name: each for name, each in observation.items() if each not in (None, "", [], {})}
    values: Sequence[Any] = list(kept.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return kept or None


def _mcp_result(observation: Mapping[str, Any]) -> Any:
    """Returns the result of a tool of MCP: its texts, if it has any, or the error."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        return f"error: {error.get('message')}"
    content = result.get("content") if isinstance(result, dict) else None
    texts = [each["text"] for each in content or () if isinstance(each, dict) and isinstance(each.get("text"), str)]
    return "\n".join(texts) if texts else result


def _parts(reward: float | None) -> dict[str, float]:
    return {} if reward is None else {"reward": reward}


def readable(text: str) -> str:
    """Returns a text of a server without control characters, and with `<|` as `< |`."""
    return readable_text(text.encode("utf-8", errors="replace"))
