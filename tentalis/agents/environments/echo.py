"""The environment echo: the policy repeats the user, message by message. The smallest task that can be learned.

A turn is right if it equals the user's message, apart from white space around it. Each turn has the reward 1 or 0; that
of the episode, with the verifier `episode`, is the share of right turns. The verifier's data are `EchoData`.
"""

from collections.abc import Mapping

from schemas.records import Message, Task
from tentalis.agents.environments.episode_task import episode_data
from tentalis.agents.environments.protocol import EnvironmentFault, EnvironmentOptions, Observation, Transition
from tentalis.rewards.episode import REWARD
from tentalis.rewards.verdict import VerifierData


class EchoData(VerifierData):
    """`then`: what the user says in the turns after the first one; empty: an episode of one turn."""

    then: tuple[str, ...] = ()


class EchoEnvironment:
    """See the module docstring. It runs no actions and needs no wall."""

    wall = ""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._said: tuple[str, ...] = ()
        self._right: list[bool] = []

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages, unchanged."""
        said = [message.content for message in task.messages if message.role == "user"]
        if not said:
            raise EnvironmentFault(f"the task {task.task_id} has no message of the user that could be repeated")
        self._said, self._right = (said[-1], *episode_data(task, EchoData).then), []
        return Observation(task.messages)

    async def step(self, action: str) -> Transition:
        """See Environment.step: the user's next message follows, until there is none."""
        right = action.strip() == self._said[len(self._right)].strip()
        self._right.append(right)
        rewards = {REWARD: float(right)}
        if len(self._right) == len(self._said):
            return Transition(rewards=rewards, done=True)
        following = Message(role="user", content=self._said[len(self._right)])
        return Transition(Observation((following,)), rewards)

    async def score(self) -> Mapping[str, float]:
        """See Environment.score. A turn that was not reached is wrong."""
        return {REWARD: sum(self._right) / len(self._said)}

    async def close(self) -> None:
        """See Environment.close: there is nothing to free."""
