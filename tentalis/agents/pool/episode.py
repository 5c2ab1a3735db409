"""An episode of an environment in terms of the contract: tools and their outputs instead of texts of turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.records import Task
from tentalis.agents.environments import Environment, LimitsScore, Observation, OffersTools, Transition
from tentalis.agents.environments.protocol import SCORE_MARGIN_S
from tentalis.agents.environments.tool_turns import call_problem
from tentalis.agents.environments.tools import signature
from tentalis.agents.pool.refusals import PoolError
from tentalis.rewards.episode import REWARD
from tentalis.text.tool_calls import RequestedCall, json_problem

TURN_TOOL = signature(
    "turn",
    "Your next turn. Returns the answer of the environment.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
"""The only tool of an environment whose turns are texts."""


class PoolEpisode:
    """One episode. Methods raise what those of Environment raise, and PoolError for a call at the wrong time.

    `score_s`: seconds that its score may take, if the environment has a limit for it.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tools: dict[str, Mapping[str, Any]] = {}
        self._done = self._scoring = False
        self._evaluated: dict[str, Any] | None = None
        self.score_s: float | None = None

    async def begin(self, task: Task) -> dict[str, Any]:
        """Begins the episode of a task. Returns the answer of /reset."""
        environment = self._environment
        observation = await environment.reset(task)
        schemas: Sequence[Mapping[str, Any]] = [TURN_TOOL]
        # The rules in the system message of an environment that offers tools are those of its texts.
        roles: tuple[str, ...] = ("system", "user")
        if isinstance(environment, OffersTools):
            schemas, roles = environment.tool_schemas(), ("user",)
        self._tools = {each["function"]["name"]: each["function"]["parameters"] for each in schemas}
        said = [message.content for message in observation.messages if message.role in roles]
        answer: dict[str, Any] = {
            "user_msg": "\n\n".join(said),
            "tool_schemas": list(schemas),
            "wall": environment.wall,
        }
        if isinstance(environment, LimitsScore):
            self.score_s = answer["score_s"] = environment.score_s + SCORE_MARGIN_S
        return answer

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carries a call out. Returns the answer of /exec_tool. A call that does not fit is answered with an error, as
        it is the model's."""
        if self._done or self._evaluated is not None:
            raise PoolError(409, "EPISODE_OVER", "the episode is over: evaluate it, or reset the lease")
        problem = json_problem([name, arguments])
        if problem is not None:
            problem = f"the call is not JSON: {problem}"
        else:
            problem = call_problem(RequestedCall(name, arguments), 0, self._tools)
        if problem is not None:
            return {"observation": f"error: {problem}", "done": False, "rewards": {}}
        if isinstance(self._environment, OffersTools):
            transition = await self._environment.call_tool(name, arguments)
        else:
            transition = await self._environment.step(arguments["text"])
        self._done = transition.done
        return {"observation": _text(transition), "done": transition.done, "rewards": dict(transition.rewards)}

    async def evaluate(self, answer: str | None) -> dict[str, Any]:
        """Scores the episode, once. Returns the answer of /evaluate."""
        if self._evaluated is None:
            if self._scoring:
                raise PoolError(409, "BROKEN", "the score was interrupted: reset the lease")
            self._scoring = True
            if answer is not None and not self._done:
                environment = self._environment
                ends = environment.answer if isinstance(environment, OffersTools) else environment.step
                await ends(answer)
                self._done = True
            parts = dict(await self._environment.score())
            self._evaluated = {"score": parts.pop(REWARD, None), "rewards": parts}
        return self._evaluated

    async def close(self) -> None:
        """Frees what the episode holds."""
        await self._environment.close()


def _text(transition: Transition) -> str:
    observation = Observation(()) if transition.done else transition.observation
    return "\n".join(message.content for message in observation.messages)
