"""One completion as an episode of one turn, to try an environment without episodes by hand."""

from collections.abc import Mapping

from schemas.records import Task
from tentalis.agents.environments.protocol import Observation, Transition


class OneAnswer:
    """The task's messages, then one answer, which its verifier grades."""

    wall = ""

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages, unchanged."""
        return Observation(task.messages)

    async def step(self, action: str) -> Transition:
        """See Environment.step: the first turn is the answer."""
        return Transition(done=True)

    async def score(self) -> Mapping[str, float]:
        """See Environment.score: it has no score of its own."""
        return {}

    async def close(self) -> None:
        """See Environment.close: there is nothing to free."""
