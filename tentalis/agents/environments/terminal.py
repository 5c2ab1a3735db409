"""The environment terminal: the policy works in a shell on the files of a task, and checks give the reward.

A turn is a command, in a fenced block. Commands run behind a wall, in a folder that lives as long as the episode. The
shell's current folder, variables and functions live on between them. `<done>`, or the last step, ends the episode. The
checks of the task come to the folder only then. The verifier's data are `TerminalData`.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.records import Message, Task, ToolCall
from tentalis.agents.environments.command_output import shown
from tentalis.agents.environments.dockerfile import CopiedFiles, SetupCommand
from tentalis.agents.environments.episode_task import episode_data, named_prompt, task_name
from tentalis.agents.environments.folders import new_folder, remove_folder
from tentalis.agents.environments.protocol import (
    EnvironmentFault,
    EnvironmentOptions,
    LeftFile,
    Observation,
    Transition,
)
from tentalis.agents.environments.shell_steps import cut_streams, in_thread, recorded_call, recorded_output
from tentalis.agents.environments.shown_paths import ShownPaths
from tentalis.agents.environments.terminal_checks import AGENT, CheckedEpisode, agent_paths, checked
from tentalis.agents.environments.terminal_shell import FILES, STATE, CommandStops, TerminalShell, agent_variables
from tentalis.agents.environments.terminal_task import (
    HOME,
    TEMPORARY,
    BadTasks,
    TerminalTask,
    check_out_of_reach,
    copy_files,
    load_task,
    task_names,
)
from tentalis.agents.environments.terminal_turns import (
    BASH_TOOL,
    INSTRUCTIONS,
    LONGEST_COMMAND,
    TOO_LONG,
    TerminalTurn,
    command_turn,
    parsed_turn,
)
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits
from tentalis.rewards.verdict import VerifierData

SHOWN_CHARACTERS = 4000
"""Characters of a command's output that the policy sees: its head and tail."""
_OUTPUT_BYTES = 1 << 18
_SETUP_S = 60.0


class TerminalData(VerifierData):
    """The task's folder by its name; without it, the user's message is the name. `digest`: SHA-256 of the folder, as
    `tentalis env tasks` prints it; an episode of another content is refused."""

    task: str | None = None
    digest: str | None = None


class TerminalEnvironment:
    """See the module docstring. Raises BadTasks or WallMissing."""

    def __init__(self, options: EnvironmentOptions) -> None:
        if options.tasks is None:
            raise BadTasks("the environment terminal needs a folder of tasks: --tasks FOLDER")
        self._wall = options.wall()
        self._attachment_bytes = options.attachment_bytes
        self._tasks = options.tasks.resolve()
        task_names(self._tasks)
        check_out_of_reach(self._tasks, self._wall.readable)
        self._folder: Path | None = None
        self._task: TerminalTask | None = None
        self._shell: TerminalShell | None = None
        self._paths = ShownPaths({})
        self._checked: CheckedEpisode | None = None
        self._turns = self._commands = self._bad_turns = 0
        self._seconds = 0.0

    @property
    def wall(self) -> str:
        """See Environment.wall."""
        return self._wall.name

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages with the task folder's instruction."""
        self._turns = self._commands = self._bad_turns = 0
        self._seconds, self._checked = 0.0, None
        data = episode_data(task, TerminalData)
        name = task_name(task, data.task)
        loaded = await in_thread(lambda stop: load_task(self._tasks, name))
        if data.digest is not None and data.digest != loaded.digest:
            raise EnvironmentFault(
                f"the task folder {name} has changed: its digest is {loaded.digest}, and the task names {data.digest}"
            )
        self._task = loaded
        await in_thread(lambda stop: self._prepare(loaded, stop))
        where = f"Your folder is {loaded.workdir}."
        return Observation(named_prompt(task, name, INSTRUCTIONS, f"{loaded.instruction}\n\n{where}"))

    def _prepare(self, task: TerminalTask, stop: CommandStops) -> None:
        """Makes the folder of an episode with the files of the task.

        Raises OSError, SandboxFault or EnvironmentFault.
        """
        self._folder = folder = new_folder()
        agent = folder / AGENT
        roots = agent_paths(task, folder)
        self._paths = paths = ShownPaths(roots)
        for each in (agent / STATE, agent / FILES, *roots.values(), paths.path(task.workdir)):
            each.mkdir(parents=True, exist_ok=True)
        limits = Limits(
            time_s=task.settings.command_s,
            cpu_s=int(task.settings.command_s) + 1,
            memory_mb=task.memory_mb,
            output_bytes=_OUTPUT_BYTES,
        )
        variables = agent_variables(paths.path(HOME), paths.path(TEMPORARY))
        variables |= {key: paths.real(value) for key, value in task.variables.items()}
        setup = TerminalShell(self._wall, agent, Limits(time_s=_SETUP_S, memory_mb=task.memory_mb))
        for step in task.steps:
            if isinstance(step, CopiedFiles):
                copy_files(task, step, paths.path(step.target))
            else:
                self._set_up(setup, step, variables, stop)
        self._shell = TerminalShell(self._wall, agent, limits)
        self._shell.begin(paths.path(task.workdir), variables)

    def _set_up(
        self, shell: TerminalShell, step: SetupCommand, variables: Mapping[str, str], stop: CommandStops
    ) -> None:
        start = self._paths.path(step.folder)
        start.mkdir(parents=True, exist_ok=True)
        shell.begin(start, variables)
        output = shell.run(self._paths.real(step.command), stop)
        if output.exit_code != 0:
            said = self._paths.shown(shown(output, SHOWN_CHARACTERS))
            raise EnvironmentFault(f"a command of the Dockerfile failed: {step.command}: {said}")

    async def step(self, action: str) -> Transition:
        """See Environment.step."""
        return await self._turn(parsed_turn(action))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """See OffersTools.tool_schemas."""
        return [BASH_TOOL]

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Transition:
        """See OffersTools.call_tool."""
        return await self._turn(command_turn(arguments["command"]))

    async def answer(self, text: str) -> Transition:
        """See OffersTools.answer: a text is no part of the task."""
        return Transition(done=True)

    async def _turn(self, turn: TerminalTurn) -> Transition:
        task, shell = self._task, self._shell
        assert task is not None and shell is not None, "step before reset"
        calls = [] if self._turns else [recorded_call("task", {"task": task.name, "digest": task.digest}, None)]
        self._turns += 1
        content = turn.problem or ""
        real = None if turn.command is None else self._paths.real(turn.command)
        if real is not None and len(real.encode()) > 2 * LONGEST_COMMAND - 1:
            real, content = None, TOO_LONG
        if real is None or turn.command is None:
            self._bad_turns += bool(content)
        else:
            output = await self._ran(shell, real)
            calls.append(recorded_call("bash", {"command": turn.command}, recorded_output(output, self._paths)))
            content = self._shown(output, turn)
        over = task.agent_s is not None and self._seconds >= task.agent_s
        if not (turn.done or over or self._turns >= task.settings.steps):
            return Transition(Observation((Message(role="user", content=content),)), tool_calls=tuple(calls))
        return Transition(done=True, tool_calls=tuple(calls))

    @property
    def score_s(self) -> float:
        """See LimitsScore: the time limits of the checks and of the task's runs."""
        assert self._task is not None, "score_s before reset"
        settings = self._task.settings
        return self._task.checks_s + settings.command_s * len(settings.runs)

    def ending_calls(self) -> tuple[ToolCall, ...]:
        """See RecordsEnding: the output of the checks."""
        found = self._checked
        if found is None or self._task is None:
            return ()
        result = recorded_output(found.output, self._paths) | {"reward": found.reward}
        return (recorded_call("checks", {"task": self._task.name}, result),)

    def left_files(self) -> tuple[LeftFile, ...]:
        """See LeavesFiles: the output of the checks, where the record has only a part."""
        if self._checked is None or self._attachment_bytes is None:
            return ()
        return cut_streams("checks", self._checked.output, self._paths, self._attachment_bytes)

    async def _ran(self, shell: TerminalShell, command: str) -> CommandOutput:
        self._commands += 1
        started = asyncio.get_running_loop().time()
        output = await in_thread(lambda stop: shell.run(command, stop))
        self._seconds += asyncio.get_running_loop().time() - started
        return output

    def _shown(self, output: CommandOutput, turn: TerminalTurn) -> str:
        content = self._paths.shown(shown(output, SHOWN_CHARACTERS))
        if output.end is CommandEnd.TIMED_OUT and self._task is not None:
            content += f" [a command has {self._task.settings.command_s:g} s]"
        if turn.left_out:
            content += f"\n[only the first command of a turn is run; {turn.left_out} not run]"
        return content

    async def score(self) -> Mapping[str, float]:
        """See Environment.score: the checks run once, when the episode has ended."""
        task, folder = self._task, self._folder
        assert task is not None and folder is not None, "score before reset"
        if self._checked is None:
            self._checked = await in_thread(lambda stop: checked(self._wall, task, folder, stop))
        found = self._checked
        counts = {"commands": float(self._commands), "bad_turns": float(self._bad_turns)}
        return {**found.parts, **counts, "reward": found.reward}

    async def close(self) -> None:
        """See Environment.close: removes the folder."""
        if self._folder is not None:
            await asyncio.to_thread(remove_folder, self._folder)
            self._folder = None
