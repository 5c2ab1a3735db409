"""The protocol of an environment, and the values that pass through it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from schemas.records import Message, Task, ToolCall
from tentalis.agents.sandbox import Wall
from tentalis.rewards.environment_file import DeclaredEnvironment, EnvironmentServer


class EnvironmentFault(Exception):
    """The environment, not the policy, failed: a sandbox did not start, a server is unavailable.

    The worker begins the episode again. If that does not help, the result has the status infra: no reward, in no group.
    """


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Options of an environment in this process.

    `wall` makes the wall for its actions; it raises WallMissing. `tools`: the file of tools (`toolcall`), or None.
    `tool_mapping`: the tools, if that is a file of environments, which has them beside other things. `tasks`: the
    folder of task folders (`terminal`) or instances (`swe`), or None. `server`: the server that plays the episodes
    (`env-pool`), or None. `attachment_bytes`: the most bytes of a file that is stored; None: none is stored.
    `declared`: the environment of the file of environments that this one plays, or None.
    """

    wall: Callable[[], Wall]
    tools: Path | None = None
    tasks: Path | None = None
    tool_mapping: Mapping[str, Any] | None = None
    server: EnvironmentServer | None = None
    attachment_bytes: int | None = None
    declared: DeclaredEnvironment | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages that the policy sees before its next turn; none from the role assistant."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Transition:
    """The result of a step. `rewards`: parts of the reward of this step, by name. `observation` is ignored if `done`.
    `tool_calls`: the calls that the step made, with their outputs. `steps`: parts of the turn's text, in order, which a
    step judge grades one by one; empty: the whole text is one step."""

    observation: Observation = Observation(())
    rewards: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    steps: tuple[str, ...] = ()


class Environment(Protocol):
    """One episode at a time: `reset`, then `step` for each turn of the policy, then `score` and `close`.

    Any method may raise EnvironmentFault. Another exception counts as one too: a defect of an environment is never
    blamed on the policy.
    """

    @property
    def wall(self) -> str:
        """Name/version of the wall that confined the actions; empty if the environment runs none."""
        ...

    async def reset(self, task: Task) -> Observation:
        """Begins an episode and returns the prompt: the task's messages, with the instructions of the environment."""
        ...

    async def step(self, action: str) -> Transition:
        """Takes the policy's text of one turn. A wrong action is an observation, not an exception.

        It is cancelled at the time limit of the episode, which is scored and closed then. So when it raises
        CancelledError, nothing that it started may run any more: threads of `run_stoppable` have ended. The exception
        is a call of an MCP server, which may run on in the server until `close` ends its session.
        """
        ...

    async def score(self) -> Mapping[str, float]:
        """Returns the parts of the reward of the episode so far. `reward` is the whole, in [-1, 1]; without it, the
        task's verifier must grade the result."""
        ...

    async def close(self) -> None:
        """Frees what the episode holds. Called once after every reset, also after a fault."""
        ...


@runtime_checkable
class RecordsEnding(Protocol):
    """An environment that records what an episode left, such as a patch or the output of checks."""

    def ending_calls(self) -> tuple[ToolCall, ...]:
        """Returns the records that no transition had. Called once, after `score`."""
        ...


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file that an episode left, of `size` bytes. `content`: None if it is larger than the limit."""

    name: str
    media_type: str
    size: int
    content: bytes | None

    @classmethod
    def of(cls, name: str, media_type: str, content: bytes, limit: int) -> "LeftFile":
        """Returns a file, without its content if that has more than `limit` bytes."""
        return cls(name, media_type, len(content), content if len(content) <= limit else None)


@runtime_checkable
class LeavesFiles(Protocol):
    """An environment that has files of an episode which its records have only in part."""

    def left_files(self) -> tuple[LeftFile, ...]:
        """Returns the files, with different names. Called once, after `score`, if the worker stores attachments
        (EnvironmentOptions.attachment_bytes)."""
        ...


@runtime_checkable
class LimitsScore(Protocol):
    """An environment whose `score` stops by itself what it runs, such as checks, and says what that means.

    The worker's limit of the time of `score` is above this one, so that checks that hang are not an infrastructure
    fault.
    """

    @property
    def score_s(self) -> float:
        """The limit of `score` for this episode, in seconds. Read after `reset`."""
        ...


@runtime_checkable
class NamesEpisode(Protocol):
    """An environment that must know which episode it plays, such as one on a server that gives the same lease for the
    same name."""

    def name_episode(self, sample: int, attempt: int) -> None:
        """Tells the index of the sample of the task, from 0, and the number of the attempt, from 1. Called once, before
        `reset`."""
        ...


@dataclass(frozen=True, slots=True)
class ProgramAccess:
    """The model that a program calls: the address of a gateway or another server without /v1, the API key, and the name
    of the model."""

    url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program. `exit_code`: None unless it ended by itself. `timed_out`: its time limit ended it. `said`:
    the end of its error output, for messages."""

    exit_code: int | None
    timed_out: bool
    said: str

    @property
    def succeeded(self) -> bool:
        """True if it ended by itself, without an error."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def remark(self) -> str:
        """The end of its error output as a sentence to append; "" without one."""
        return f". The program said: {self.said}" if self.said else ""


@runtime_checkable
class RunsProgram(Protocol):
    """An environment whose turns a program makes by calls of a model, instead of the worker. `step` is never called:
    the worker joins the episode from the program's calls, and then asks for the score."""

    @property
    def program_s(self) -> float:
        """The time limit of the program, in seconds. Read after `reset`."""
        ...

    async def run_program(self, access: ProgramAccess) -> ProgramEnd:
        """Runs the program to its end. Cancelled as `step` is. Raises EnvironmentFault if it could not be started."""
        ...


@runtime_checkable
class OffersTools(Protocol):
    """An environment whose turns can also be made of calls of tools, for agents that are not our policy
    (`tentalis serve env-pool`)."""

    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tools as in OpenAI's API. Called after `reset`."""
        ...

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Transition:
        """Makes a turn of one call of a tool; like `step`. The arguments fit the tool's schema. The observation is the
        output alone."""
        ...

    async def answer(self, text: str) -> Transition:
        """Ends the episode with the text of a turn without a call; like `step`."""
        ...


SCORE_MARGIN_S = 60.0
"""Seconds for the score beside the limit of what the environment runs for it: copies, comparisons, the wall's start."""
EnvironmentMaker = Callable[[EnvironmentOptions], Environment]
"""Makes an environment. An entry point of `tentalis.environments` names one: a class or a function."""
