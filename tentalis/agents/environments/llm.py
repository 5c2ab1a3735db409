"""The environment llm: one turn that answers in steps, `<step>...</step>` and `<answer>...</answer>`.

The steps are on the log, so that a step judge grades each of them. The verifiers gsm8k, math, math_verify and
reasoning_gym grade the answer, or `episode` with `LlmData`.
"""

from collections.abc import Mapping

from schemas.records import Task
from tentalis.agents.environments.episode_task import episode_data
from tentalis.agents.environments.protocol import EnvironmentOptions, Observation, Transition
from tentalis.agents.environments.step_tags import steps_or_whole, tagged_steps, with_instructions
from tentalis.rewards.answers import same_latex, stated_answer
from tentalis.rewards.verdict import VerifierData


class LlmData(VerifierData):
    """The reference answer of the verifier `episode`; None: the reward is unknown."""

    answer: str | None = None


class LlmEnvironment:
    """See the module docstring. It runs no actions and needs no wall."""

    wall = ""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._text = ""
        self._data = LlmData()

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages, with the format in the system message."""
        self._text, self._data = "", episode_data(task, LlmData)
        return Observation(with_instructions(task.messages))

    async def step(self, action: str) -> Transition:
        """See Environment.step: the first turn is the answer."""
        self._text = action
        return Transition(done=True, steps=steps_or_whole(action))

    async def score(self) -> Mapping[str, float]:
        """See Environment.score. `tagged_steps`: the step blocks of the answer."""
        parts = {"tagged_steps": float(len(tagged_steps(self._text)))}
        if self._data.answer is None:
            return parts
        stated = stated_answer(self._text) or self._text.strip()
        return parts | {"reward": float(same_latex(stated, self._data.answer))}

    async def close(self) -> None:
        """See Environment.close: there is nothing to free."""
