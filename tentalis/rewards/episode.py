"""The scorer of episodes: the reward is what the environment recorded in the result. Pure."""

import math

from schemas.records import Ending, Result, StepReward, Task
from tentalis.rewards.verdict import ScoredStep, Verdict

ENVIRONMENT_GROUP = "tentalis.environments"
"""Entry points with this group are environments; each has the verifier `episode`."""
REWARD = "reward"
"""Name of the part that is the whole reward."""


class EpisodeScorer:
    """The environment's reward, its other parts as components, and the rewards of its steps.

    Unknown for a result that is not an episode, and for an episode whose environment recorded no `reward`.
    """

    name = "episode/1"
    slow = False

    def check(self, task: Task) -> None:
        """Accepts every task: the environment reads the data."""

    def verify(self, task: Task, result: Result) -> Verdict:
        """See ResultVerifier.verify."""
        if result.ending in (Ending.NONE, Ending.UNKNOWN):
            return Verdict.unknown()
        parts = {name: value for name, value in result.rewards.items() if name != REWARD}
        parts |= {"turns": float(len(result.turns)), f"ending.{result.ending.value}": 1.0}
        reward = result.rewards.get(REWARD)
        if reward is None or not -1.0 <= reward <= 1.0:
            return Verdict.unknown(**parts)
        start = len(result.prompt_token_ids) // 4
        steps = tuple(
            ScoredStep(step.start + start, step.end + start, value)
            for step in result.step_rewards
            if (value := _step_reward(step)) is not None
        )
        return Verdict(reward, parts, steps=steps)

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns None: an environment has no complaints."""
        return None


def _step_reward(step: StepReward) -> float | None:
    """Returns the reward of a step: its part `reward`, else the sum of its parts; None if it has none."""
    if not step.parts:
        return None
    return step.parts.get(REWARD, math.fsum(step.parts[name] for name in sorted(step.parts)))
