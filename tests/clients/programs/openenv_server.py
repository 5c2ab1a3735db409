"""Servers of OpenEnv with its own package: a game of guessing, and an environment with tools of MCP."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A number."""

    value: int


class Said(Action):
    """A text."""

    message: str


class Hint(Observation):
    """The direction of the number."""

    text: str
    tries: int = 0


class Guessing(Environment[Action, Hint, State]):
    """The number is the seed, or 7. Each guess costs 0.1, the right one brings 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._state = 7, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        """Begins a game."""
        self._number = 7 if seed is None else seed
        self._state = State(episode_id=episode_id)
        return Hint(text="Guess a number from 1 to 9.")

    def step(self, action: Action, timeout_s: float | None = None, **_: Any) -> Hint:
        """Takes a guess."""
        value = action.value if isinstance(action, Guess) else int(action.message)
        if value == 666:
            raise RuntimeError("the game is broken")
        self._state.step_count += 1
        if value == self._number:
            return Hint(text="right", tries=self._state.step_count, reward=1.0, done=True)
        said = "higher" if value < self._number else "lower"
        return Hint(text=said, tries=self._state.step_count, reward=-0.1)

    @property
    def state(self) -> State:
        """The number of the guesses."""
        return self._state


class Calculating(MCPEnvironment):
    """A calculator, whose right answer is 42."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("calculator")

        @server.tool
        def multiply(a: int, b: int) -> int:
            """The product of two numbers."""
            return a * b

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        """Begins."""
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        """Rewards the product 42."""
        found = await super().step_async(action, timeout_s, **more)
        if isinstance(found, CallToolObservation) and isinstance(action, CallToolAction):
            found.done = action.arguments in ({"a": 6, "b": 7}, {"a": 7, "b": 6})
            found.reward = float(found.done)
        return found

    @property
    def state(self) -> State:
        """Nothing."""
        return self._state


ENVIRONMENTS = {"guess": (Guessing, Guess, Hint), "say": (Guessing, Said, Hint)}
ENVIRONMENTS["calculate"] = (Calculating, CallToolAction, CallToolObservation)
made, action, observation = ENVIRONMENTS[sys.argv[1]]
app = create_fastapi_app(made, action, observation, max_concurrent_envs=int(sys.argv[3]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
