"""The environment swe: the policy corrects a defect in a repository of git, and hidden tests give the reward.

A turn may have a plan, edits, a look at the diff and a command; see `swe_turns`. All of them run behind a wall, in a
folder that lives as long as the episode. `<done>`, or the last step, ends the episode; then the hidden tests of the
instance run on what the agent changed. The verifier's data are `SweData`.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from schemas.records import Message, Task, ToolCall
from tentalis.agents.environments import swe_edit
from tentalis.agents.environments.command_output import shown
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
from tentalis.agents.environments.swe_instances import SweFolder, SweTask
from tentalis.agents.environments.swe_repository import (
    SweStore,
    make_store,
    require_git,
    write_agent_repository,
)
from tentalis.agents.environments.swe_tests import (
    RECORDED_PATCH,
    SweVerdict,
    check_python,
    graded,
    readable_for,
    test_python,
)
from tentalis.agents.environments.swe_turns import INSTRUCTIONS, SweEdit, SweTurn, command_turn, parsed_swe_turn
from tentalis.agents.environments.terminal_checks import AGENT, CHECKS
from tentalis.agents.environments.terminal_shell import (
    FILES,
    PATH,
    STATE,
    CommandStops,
    TerminalShell,
    agent_variables,
    only_with,
)
from tentalis.agents.environments.terminal_task import HOME, TEMPORARY, BadTasks, check_out_of_reach
from tentalis.agents.environments.terminal_turns import BASH_TOOL, LONGEST_COMMAND, TOO_LONG
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits, Wall
from tentalis.rewards.verdict import VerifierData

REPOSITORY = "/testbed"
"""The name under which the agent knows the folder of its repository."""
SHOWN_CHARACTERS = 8000
"""Characters of an output that the policy sees: its head and tail."""
_OUTPUT_BYTES = 1 << 18
_EDIT_S = 30.0
PATCH_CALL = "patch"
"""Name of the record of an episode's patch."""
PATCH_FILE = "patch.diff"
"""Name of the attachment with the whole patch, if the record has it in part or altered."""
_STORE = "store"
_PYTHON = str(Path(sys.executable).resolve())


class SweData(VerifierData):
    """The instance by its id; without it, the user's message is the id. `digest`: as `tentalis env tasks` prints it; an
    episode of another content is refused. The reward of an episode that passes all tests is 1, less `diff_weight` if
    its patch has `diff_lines` changed lines or more, and less a share of it for fewer lines."""

    task: str | None = None
    digest: str | None = None
    diff_weight: float = Field(default=0.0, ge=0.0, le=1.0)
    diff_lines: int = Field(default=200, ge=1)


class SweEnvironment:
    """See the module docstring. Raises BadTasks or WallMissing."""

    def __init__(self, options: EnvironmentOptions) -> None:
        if options.tasks is None:
            raise BadTasks("the environment swe needs a folder of instances: --tasks FOLDER")
        require_git()
        self._wall = options.wall()
        self._attachment_bytes = options.attachment_bytes
        self._instances = SweFolder(options.tasks)
        pythons = self._instances.pythons
        if self._instances.settings.python is None:  # for repositories that name none
            pythons = pythons | {Path(sys.prefix)}
        installed = [(each / "bin/python").resolve().parents[1] for each in pythons]
        readable = [*self._wall.readable, *(each.resolve() for each in pythons), *installed]
        check_out_of_reach(self._instances.path, readable)
        for source in self._instances.sources:
            check_out_of_reach(source.resolve(), readable, "the later commits of the repository")
        self._folder: Path | None = None
        self._episode: _SweEpisode | None = None

    @property
    def wall(self) -> str:
        """See Environment.wall."""
        return self._wall.name

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the rules, what the task says beside the instance's id, and the issue."""
        data = episode_data(task, SweData)
        name = task_name(task, data.task)

        def begin(stop: CommandStops) -> "_SweEpisode":
            loaded = self._instances.task(name)
            if data.digest is not None and data.digest != loaded.digest:
                raise EnvironmentFault(
                    f"the instance {name} has changed: its digest is {loaded.digest}, and the task names {data.digest}"
                )
            check_python(self._wall, loaded)
            self._folder = folder = new_folder()
            return _SweEpisode(self._wall, loaded, data, folder)

        self._episode = await in_thread(begin)
        issue = self._episode.task.instance.problem_statement.strip()
        return Observation(
            named_prompt(task, name, INSTRUCTIONS, f"The repository is in {REPOSITORY}. The issue:\n\n{issue}")
        )

    async def step(self, action: str) -> Transition:
        """See Environment.step."""
        assert self._episode is not None, "step before reset"
        return await self._episode.turn(parsed_swe_turn(action))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """See OffersTools.tool_schemas: a shell, with which files can be edited too."""
        return [BASH_TOOL]

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Transition:
        """See OffersTools.call_tool."""
        assert self._episode is not None, "call_tool before reset"
        return await self._episode.turn(command_turn(arguments["command"]))

    async def answer(self, text: str) -> Transition:
        """See OffersTools.answer: a text is no part of the task."""
        return Transition(done=True)

    async def score(self) -> Mapping[str, float]:
        """See Environment.score: the hidden tests run once, when the episode has ended."""
        assert self._episode is not None, "score before reset"
        return await self._episode.score()

    @property
    def score_s(self) -> float:
        """See LimitsScore: the time limit of the hidden tests."""
        assert self._episode is not None, "score_s before reset"
        return self._episode.task.settings.tests_s

    def ending_calls(self) -> tuple[ToolCall, ...]:
        """See RecordsEnding."""
        return () if self._episode is None else self._episode.ending_calls()

    def left_files(self) -> tuple[LeftFile, ...]:
        """See LeavesFiles."""
        if self._episode is None or self._attachment_bytes is None:
            return ()
        return self._episode.left_files(self._attachment_bytes)

    async def close(self) -> None:
        """See Environment.close: removes the folder."""
        if self._folder is not None:
            await asyncio.to_thread(remove_folder, self._folder)
            self._folder = self._episode = None


class _SweEpisode:
    """One episode in its folder. Making it writes the repository; raises OSError or TaskRefused."""

    def __init__(self, wall: Wall, task: SweTask, data: SweData, folder: Path) -> None:
        self.task = task
        self._wall, self._data, self._folder = wall, data, folder
        agent = folder / AGENT
        roots = {name: agent / FILES / name[1:] for name in (REPOSITORY, HOME, TEMPORARY)}
        self._paths = ShownPaths(roots)
        for each in (agent / STATE, *roots.values()):
            each.mkdir(parents=True, exist_ok=True)
        self._store: SweStore = make_store(task, folder / _STORE)
        self._store.check_patch(task.instance.test_patch)
        write_agent_repository(self._store, roots[REPOSITORY])
        settings = task.settings
        self._limits = Limits(
            time_s=settings.command_s,
            cpu_s=int(settings.command_s) + 1,
            memory_mb=settings.memory_mb,
            output_bytes=_OUTPUT_BYTES,
        )
        self._readable = readable_for(task)
        self._shell = TerminalShell(wall, agent, self._limits, self._readable)
        variables = agent_variables(roots[HOME], roots[TEMPORARY])
        self._shell.begin(roots[REPOSITORY], variables | {"PATH": f"{test_python(task).parent}:{PATH}"})
        self._turns = self._commands = self._edits = self._bad_turns = 0
        self._verdict: SweVerdict | None = None

    async def turn(self, turn: SweTurn) -> Transition:
        """Carries the actions of a turn out; see Environment.step."""
        name = self.task.instance.instance_id
        calls = [] if self._turns else [recorded_call("task", {"task": name, "digest": self.task.digest}, None)]
        self._turns += 1
        said = [] if turn.problem is None else [turn.problem]
        self._bad_turns += turn.problem is not None
        if turn.plan:
            calls.append(recorded_call("plan", {"plan": turn.plan}, None))
            said.append("[the plan is noted]")
        if turn.edits:
            said.append(await self._edit(turn.edits, calls))
        if turn.command is not None:
            said.append(await self._command(turn.command, calls))
        if turn.left_out:
            said.append(f"[only the first command of a turn is run; {turn.left_out} not run]")
        if turn.diff:
            said.append(await self._diff(calls))
        if not (turn.done or self._turns >= self.task.settings.steps):
            return Transition(Observation((Message(role="user", content="\n".join(said)),)), tool_calls=tuple(calls))
        return Transition(done=True, tool_calls=tuple(calls))

    def ending_calls(self) -> tuple[ToolCall, ...]:
        """See RecordsEnding: the agent's patch and the outcomes of the tests."""
        return () if self._verdict is None else _verdict_calls(self._verdict, self._tests_paths())

    def left_files(self, limit: int) -> tuple[LeftFile, ...]:
        """See LeavesFiles: the patch and the output of the tests, where the records have only a part."""
        found = self._verdict
        if found is None:
            return ()
        patch = (LeftFile.of(PATCH_FILE, "text/x-diff", found.patch, limit),)
        tests = () if found.output is None else cut_streams("tests", found.output, self._tests_paths(), limit)
        return (() if _is_recorded(found.patch) else patch) + tests

    async def _edit(self, edits: tuple[SweEdit, ...], calls: list[ToolCall]) -> str:
        self._edits += len(edits)
        real = [{"path": self._place(edit.path), "search": edit.search, "replace": edit.replace} for edit in edits]
        file, program = self._folder / "edits.json", Path(swe_edit.__file__)
        file.write_text(json.dumps({"edits": real}), encoding="utf-8")
        limits = Limits(time_s=_EDIT_S, cpu_s=int(_EDIT_S) + 1, memory_mb=512, output_bytes=_OUTPUT_BYTES)
        words = [_PYTHON, "-I", "-B", str(program)]
        agent = self._folder / AGENT

        def made(stop: CommandStops) -> CommandOutput:
            return self._wall.run(words, agent, limits, stdin=file, readable=(file, program), stop=stop.event())

        output = await in_thread(made)
        for edit in edits:
            arguments = {"path": edit.path, "search": edit.search, "replace": edit.replace}
            calls.append(recorded_call("edit", arguments, recorded_output(output, self._paths)))
        return self._paths.shown(shown(output, SHOWN_CHARACTERS))

    def _place(self, path: str) -> str:
        """Returns the path of a file that the agent names, absolute or in its repository."""
        return self._paths.real(path if path.startswith("/") else f"{REPOSITORY}/{path}")

    async def _command(self, command: str, calls: list[ToolCall]) -> str:
        real = self._paths.real(command)
        if len(real.encode()) > 2 * LONGEST_COMMAND - 1:
            self._bad_turns += 1
            return TOO_LONG
        self._commands += 1
        output = await in_thread(lambda stop: self._shell.run(real, stop))
        calls.append(recorded_call("bash", {"command": command}, recorded_output(output, self._paths)))
        said = self._paths.shown(shown(output, SHOWN_CHARACTERS))
        if output.end is CommandEnd.TIMED_OUT:
            said += f" [a command has {self.task.settings.command_s:g} s]"
        return said

    async def _diff(self, calls: list[ToolCall]) -> str:
        """Shows what git in the agent's repository says has changed since the base commit."""
        base = self._store.base
        words = f"cd {self._place('')} && git add --intent-to-add --all && git --no-pager diff --no-color {base}"
        agent = self._folder / AGENT
        variables = agent_variables(self._paths.path(HOME), self._paths.path(TEMPORARY))

        def looked(stop: CommandStops) -> CommandOutput:
            command = [*only_with(variables), "/bin/sh", "-c", words]
            return self._wall.run(command, agent, self._limits, stop=stop.event())

        output = await in_thread(looked)
        calls.append(recorded_call("diff", {}, recorded_output(output, self._paths)))
        return self._paths.shown(shown(output, SHOWN_CHARACTERS))

    async def _tests(self) -> SweVerdict:
        if self._verdict is None:
            agent = self._folder / AGENT / FILES / REPOSITORY[1:]
            self._verdict = await in_thread(
                lambda stop: graded(self._wall, self.task, self._store, agent, self._folder, stop)
            )
        return self._verdict

    def _tests_paths(self) -> ShownPaths:
        checks = self._folder / CHECKS
        return ShownPaths({REPOSITORY: checks / "tree", TEMPORARY: checks / "scratch/tmp"})

    async def score(self) -> Mapping[str, float]:
        """See Environment.score."""
        return {
            **test_parts(await self._tests(), self._data),
            "commands": float(self._commands),
            "edits": float(self._edits),
            "bad_turns": float(self._bad_turns),
        }


def test_parts(found: SweVerdict, data: SweData) -> dict[str, float]:
    """Returns the reward of the hidden tests and its parts."""
    less = data.diff_weight * min(1.0, found.n_lines / data.diff_lines)
    return {
        **found.parts,
        "reward": (1.0 - less) * found.resolved,
        "tests": float(found.resolved),
        "fail_to_pass": found.fail_to_pass,
        "pass_to_pass": found.pass_to_pass,
        "diff_files": float(found.n_files),
        "diff_lines": float(found.n_lines),
    }


def _is_recorded(patch: bytes) -> bool:
    """Returns True if the record of a patch has all of it, unaltered."""
    return len(patch) <= RECORDED_PATCH and patch.decode("utf-8", errors="replace").encode() == patch


def _verdict_calls(found: SweVerdict, paths: ShownPaths) -> tuple[ToolCall, ...]:
    """Returns the records of the agent's patch and of the hidden tests."""
    kept = found.patch[:RECORDED_PATCH].decode("utf-8", errors="replace")
    whole = len(found.patch) <= RECORDED_PATCH
    patch = {"patch": kept, "whole": whole, "sha256": hashlib.sha256(found.patch).hexdigest()}
    tests: dict[str, object] = {"resolved": found.resolved, "outcomes": dict(found.outcomes), **found.parts}
    if found.output is not None:
        tests |= recorded_output(found.output, paths)
    return recorded_call(PATCH_CALL, {}, patch), recorded_call("tests", {}, tests)
