"""The environment verifiers: plays an environment of the package verifiers, by name and arguments, without a change.

Only an environment of the file of environments can have it as its base, with `name` in its data. A process with the
Python of verifiers plays all episodes: see `verifiers_child`. The verifier's data are `VerifiersData`.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from schemas.problems import problems
from schemas.records import Message, Task
from tentalis.agents.environments.episode_task import episode_data
from tentalis.agents.environments.protocol import EnvironmentFault, EnvironmentOptions, Observation, Transition
from tentalis.agents.environments.stoppable import run_stoppable
from tentalis.agents.environments.verifiers_process import (
    BadVerifiersEnvironment,
    VerifiersEpisode,
    VerifiersProcess,
    VerifiersSettings,
)
from tentalis.rewards.environment_file import DeclaredEnvironment
from tentalis.rewards.episode import REWARD
from tentalis.rewards.verdict import VerifierData

_ROWS = 100
_ROUNDING = 1e-6


class VerifiersData(VerifierData):
    """`name`, `arguments`: of verifiers' `load_environment`. `judge`: its rubric may call judge models. `reward_range`:
    the lowest and highest reward, which become -1 and 1; None: rewards lie in [-1, 1]. `row`: the row of its data set,
    without the prompt."""

    name: str = ""
    arguments: Mapping[str, JsonValue] = Field(default_factory=dict)
    judge: bool = False
    reward_range: tuple[float, float] | None = None
    row: Mapping[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError("reward_range must be the lowest and a higher reward")
        return self


class VerifiersEnvironment:
    """See the module docstring. Raises BadVerifiersEnvironment."""

    wall = ""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._data, self._process = _process_of(options.declared)
        self._process.check()
        self._episode: VerifiersEpisode | None = None

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the prompt of verifiers' environment, which begins with the task's messages."""
        data = episode_data(task, VerifiersData)
        if data.model_copy(update={"row": {}}) != self._data:
            raise EnvironmentFault(
                f"the task {task.task_id} is not one of {self._data.name} with the arguments "
                f"{json.dumps(self._data.arguments)}: its verifier must be `episode`, with the data of the file"
            )
        prompt = [{"role": message.role, "content": message.content} for message in task.messages]
        row = {"example_id": 0, **data.row, "prompt": prompt}
        self._episode = self._process.episode()
        opened = await self._ask("open", row=row)
        if opened["done"]:
            raise EnvironmentFault(f"{self._data.name} ended the episode before the first turn")
        return _observation(opened)

    async def step(self, action: str) -> Transition:
        """See Environment.step."""
        reply = await self._ask("step", text=action)
        return Transition(done=True) if reply["done"] else Transition(_observation(reply))

    async def score(self) -> Mapping[str, float]:
        """See Environment.score: the weighted sum of the rubric, and the value of each of its functions by name."""
        reply = await self._ask("score")
        parts = {f"rubric.{name}" if name == REWARD else name: value for name, value in reply["metrics"].items()}
        return parts | {REWARD: _mapped(reply["reward"], self._data)}

    async def close(self) -> None:
        """See Environment.close: verifiers cleans up."""
        episode, self._episode = self._episode, None
        if episode is not None:
            await run_stoppable(episode.close, episode.stop)

    async def _ask(self, op: str, **request: Any) -> dict[str, Any]:
        episode = self._episode
        assert episode is not None, f"{op} before reset"
        return await run_stoppable(lambda: episode.ask(op, **request), episode.stop)


def rows_of(declared: DeclaredEnvironment, *, evaluation: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of the data set of an environment as prompts for `tentalis learn`: `messages` and `row`.

    Args:
        evaluation: the data set for evaluation instead of the one for training.

    Raises:
        BadVerifiersEnvironment: it cannot be loaded, or a row cannot be a task.
    """
    _, process = _process_of(declared)
    process.check()
    total, start = 1, 0
    while start < total:
        try:
            reply = process.ask("rows", evaluation=evaluation, start=start, count=_ROWS)
        except EnvironmentFault as error:
            raise BadVerifiersEnvironment(f"the environment {declared.name}: {error}") from error
        yield from reply["rows"]
        total, start = reply["total"], start + _ROWS


def _process_of(declared: DeclaredEnvironment | None) -> tuple[VerifiersData, VerifiersProcess]:
    """Returns the data of an environment of the file, and its process. Raises BadVerifiersEnvironment."""
    try:
        data = VerifiersData() if declared is None else VerifiersData.model_validate(declared.data)
    except ValidationError as error:
        raise BadVerifiersEnvironment(f"the data of the file of environments: {problems(error, 'data')}") from error
    if declared is None or not data.name:
        raise BadVerifiersEnvironment(
            "the environment verifiers needs a file of environments with `base: verifiers` and "
            "`data: {name: NAME, arguments: {...}}` (docs/how-to/verifiers.md)"
        )
    if data.row:
        raise BadVerifiersEnvironment(f"{declared.file}: environments.{declared.name}.data.row: tasks have rows")
    python = declared.python or Path(sys.executable)
    arguments = json.dumps(data.arguments, sort_keys=True)
    return data, shared_process(VerifiersSettings(data.name, arguments, data.judge, python, declared.file.parent))


@cache
def shared_process(settings: VerifiersSettings) -> VerifiersProcess:
    """Returns the process of an environment. It lives as long as this one."""
    return VerifiersProcess(settings)


def _observation(reply: Mapping[str, Any]) -> Observation:
    return Observation(tuple(Message(role=each["role"], content=each["content"]) for each in reply["messages"]))


def _mapped(reward: float | None, data: VerifiersData) -> float:
    """Returns a reward in [-1, 1]. None: the policy finished no turn, which is the reward of the range that is nearest
    to 0. Raises EnvironmentFault."""
    low, high = data.reward_range or (-1.0, 1.0)
    if reward is None:
        reward = min(high, max(low, 0.0))
    slack = _ROUNDING * (high - low)
    if not low - slack <= reward <= high + slack:  # also one that is not a number
        such = (
            f", such as [{math.floor(min(reward, 0.0))}, {math.ceil(max(reward, 1.0))}]"
            if math.isfinite(reward)
            else ""
        )
        raise EnvironmentFault(
            f"the reward of {data.name} is {reward:g}, outside [{low:g}, {high:g}]: set reward_range in the data of "
            f"the file of environments to its lowest and highest reward{such}; it is mapped to [-1, 1]"
        )
    mapped = reward if data.reward_range is None else 2.0 * (reward - low) / (high - low) - 1.0
    return min(1.0, max(-1.0, mapped))
