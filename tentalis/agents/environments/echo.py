"""The environment echo: the policy repeats the last message of the user. The smallest task that can be learned.

The reward of the verifier `episode` is 1 if the answer equals the message, apart from white space around it; else 0.
"""

from collections.abc import Mapping

from schemas.records import Task
from tentalis.agents.environments.protocol import EnvironmentFault, EnvironmentOptions, Observation, Transition


class EchoEnvironment:
    """See the module docstring. It runs no actions and needs no wall."""

    wall = ""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._expected, self._answer = "", ""

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages, unchanged."""
        said = [message.content for message in task.messages if message.role == "user"]
        if not said:
            raise EnvironmentFault(f"the task {task.task_id} has no message of the user that could be repeated")
        self._expected, self._answer = said[-1], ""
        return Observation(task.messages)

    async def step(self, action: str) -> Transition:
        """See Environment.step: the first turn is the answer."""
        self._answer = action
        return Transition(done=True)

    async def score(self) -> Mapping[str, float]:
        """See Environment.score."""
        return {"reward": float(self._answer.strip() == self._expected.strip())}

    async def close(self) -> None:
        """See Environment.close: there is nothing to free."""
