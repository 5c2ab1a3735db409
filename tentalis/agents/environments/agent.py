"""The environment agent: a program plays the episode, unchanged, with its own calls of a model.

Only an environment of the file of environments can have it as its base, with `program`. The program runs behind a wall
in a folder of its own, with the task on its input and the gateway in the variables of the common clients. Then the
check of the file gives the reward. The verifier's data are `AgentData`; the program does not see them.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from pydantic import ConfigDict

from schemas.records import Task, ToolCall
from tentalis.agents.environments.agent_check import CheckedProgram, checked_program
from tentalis.agents.environments.agent_program import (
    TASK_FILE,
    VARIABLES_FILE,
    ProgramPlace,
    make_folders,
    program_limits,
    program_words,
    python_of,
    readable_paths,
    write_input,
)
from tentalis.agents.environments.episode_task import episode_data
from tentalis.agents.environments.folders import new_folder, remove_folder
from tentalis.agents.environments.protocol import (
    EnvironmentFault,
    EnvironmentOptions,
    LeftFile,
    Observation,
    ProgramAccess,
    ProgramEnd,
    Transition,
)
from tentalis.agents.environments.shell_steps import cut_streams, in_thread, recorded_call, recorded_output
from tentalis.agents.environments.shown_paths import ShownPaths
from tentalis.agents.environments.terminal_shell import CommandStops
from tentalis.agents.environments.terminal_task import BadTasks, check_out_of_reach
from tentalis.agents.sandbox import CommandEnd, CommandOutput
from tentalis.rewards.environment_file import AgentProgram
from tentalis.rewards.verdict import VerifierData
from tentalis.text.tool_output import head_and_tail, readable_text

_SAID_CHARACTERS = 1000
_CANNOT_EXECUTE = (126, 127)
"""Exit codes of a shell that could not start the program: it is not there, or must not be executed."""


class BadProgram(ValueError):
    """An environment agent that cannot be played. The message says what to correct."""


class AgentData(VerifierData):
    """`workspace`: the folder of the task in the program's folder of workspaces. All other keys are for the check, such
    as an expected `answer`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    workspace: str | None = None


class AgentEnvironment:
    """See the module docstring. Raises BadProgram or WallMissing."""

    def __init__(self, options: EnvironmentOptions) -> None:
        declared = options.declared
        if declared is None or declared.program is None:
            raise BadProgram(
                "the environment agent needs a file of environments with `base: agent` and `program: {command: [...]}` "
                "(docs/how-to/unchanged-agents.md)"
            )
        self._program: AgentProgram = declared.program
        self._source = declared.file.parent
        self._python = python_of(declared.python)
        self._attachment_bytes = options.attachment_bytes
        self._wall = options.wall()
        self._readable = readable_paths(self._program, self._source, self._python)
        where = f"{declared.file}: environments.{declared.name}.program"
        for path in (*self._readable, self._source / (self._program.workspace or ".")):
            if not path.exists():
                raise BadProgram(f"{where}: there is no {path}: paths are relative to {self._source}")
        if self._program.check is not None:
            self._check_hidden(declared.file, where)
        self._place: ProgramPlace | None = None
        self._task: Task | None = None
        self._data = AgentData()
        self._ended: CommandOutput | None = None
        self._checked: CheckedProgram | None = None

    def _check_hidden(self, file: Path, where: str) -> None:
        """Raises BadProgram if the program may read the file of environments, and with it the checks beside it."""
        if Path("/") in self._wall.readable:
            return  # without a wall, which the operator has allowed
        try:
            check_out_of_reach(file, [*self._wall.readable, *self._readable], "the check beside")
        except BadTasks as error:
            raise BadProgram(f"{where}.readable: {error}") from error

    @property
    def wall(self) -> str:
        """See Environment.wall."""
        return self._wall.name

    @property
    def program_s(self) -> float:
        """See RunsProgram."""
        return self._program.seconds

    @property
    def score_s(self) -> float:
        """See LimitsScore: the time limit of the check."""
        return self._program.check_seconds

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages. The program adds its own."""
        self._task, self._data = task, episode_data(task, AgentData)
        self._ended = self._checked = None
        await in_thread(lambda stop: self._prepare())
        return Observation(task.messages)

    def _prepare(self) -> None:
        place = self._place = ProgramPlace(new_folder(), self._source, self._python)
        make_folders(place, self._program, self._data.workspace)

    async def step(self, action: str) -> Transition:
        """See Environment.step. Raises EnvironmentFault: the program makes the turns."""
        raise EnvironmentFault("a program makes the turns of this environment: it cannot be played turn by turn")

    async def run_program(self, access: ProgramAccess) -> ProgramEnd:
        """See RunsProgram.run_program."""
        output = self._ended = await in_thread(lambda stop: self._run(access, stop))
        said = head_and_tail(readable_text(output.stderr or output.stdout).strip(), _SAID_CHARACTERS)
        if output.exit_code in _CANNOT_EXECUTE:
            raise EnvironmentFault(f"{self._program.command[0]} could not be started: {said}")
        return ProgramEnd(output.exit_code, output.end is CommandEnd.TIMED_OUT, said)

    def _run(self, access: ProgramAccess, stop: CommandStops) -> CommandOutput:
        place, task = self._place, self._task
        assert place is not None and task is not None, "run_program before reset"
        write_input(place, self._program, task, access)
        return self._wall.run(
            program_words(place, self._program, task, access),
            place.agent,
            program_limits(self._program, access),
            stdin=place.episode / TASK_FILE,
            readable=[*self._readable, place.episode / TASK_FILE, place.episode / VARIABLES_FILE],
            stop=stop.event(),
        )

    async def score(self) -> Mapping[str, float]:
        """See Environment.score: that of the check. Without a check there is no `reward`."""
        ended = self._ended
        assert ended is not None, "score before run_program"
        parts = {} if ended.exit_code is None else {"exit_code": float(ended.exit_code)}
        if self._program.check is None:
            return parts
        if self._checked is None:
            self._checked = await in_thread(lambda stop: self._check(ended, stop))
        return {**parts, **self._checked.parts, "reward": self._checked.reward}

    def _check(self, ended: CommandOutput, stop: CommandStops) -> CheckedProgram:
        place, task = self._place, self._task
        assert place is not None and task is not None, "score before reset"
        data = {**(self._data.model_extra or {}), "workspace": self._data.workspace}
        return checked_program(self._wall, place, self._program, task, data, ended, self._readable, stop)

    def ending_calls(self) -> tuple[ToolCall, ...]:
        """See RecordsEnding: the output of the program, and that of the check."""
        paths = self._paths()
        calls = []
        if self._ended is not None:
            command = {"command": list(self._program.command)}
            calls.append(recorded_call("program", command, recorded_output(self._ended, paths)))
        if self._checked is not None:
            result = recorded_output(self._checked.output, paths) | {"reward": self._checked.reward}
            calls.append(recorded_call("check", {"command": list(self._program.check or ())}, result))
        return tuple(calls)

    def left_files(self) -> tuple[LeftFile, ...]:
        """See LeavesFiles: the whole output of program and check, where the record has only a part."""
        limit = self._attachment_bytes
        if limit is None:
            return ()
        outputs = {"program": self._ended, "check": None if self._checked is None else self._checked.output}
        found = (cut_streams(name, output, self._paths(), limit) for name, output in outputs.items() if output)
        return tuple(file for files in found for file in files)

    def _paths(self) -> ShownPaths:
        return ShownPaths({} if self._place is None else {"/workspace": self._place.workspace})

    async def close(self) -> None:
        """See Environment.close: removes the folder."""
        place, self._place = self._place, None
        if place is not None:
            await asyncio.to_thread(remove_folder, place.episode)
