"""The environment toolcall: the policy calls Python or tools of a file, sees their output, and answers.

A turn without a call is the answer and ends the episode. Calls run behind a wall, in a folder that lives as long as the
episode. The task's verifier data are `ToolcallData`; with another verifier than `episode`, that one grades the answer.
"""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.records import Message, Task, ToolCall
from tentalis.agents.environments.command_output import shown
from tentalis.agents.environments.episode_task import episode_data
from tentalis.agents.environments.folders import new_folder, remove_folder
from tentalis.agents.environments.import_rules import import_problem
from tentalis.agents.environments.protocol import EnvironmentFault, EnvironmentOptions, Observation, Transition
from tentalis.agents.environments.stoppable import run_stoppable
from tentalis.agents.environments.tool_turns import SHOWN_CHARACTERS, after_calls, call_problem, with_tools
from tentalis.agents.environments.tools import (
    PYTHON_SIGNATURE_PARAMETERS,
    PYTHON_TOOL,
    McpServer,
    Tool,
    ToolFile,
    read_tools,
)
from tentalis.agents.sandbox import CommandOutput, Limits, RunningCommand, SandboxFault
from tentalis.rewards.answers import same_latex, stated_answer
from tentalis.rewards.verdict import VerifierData
from tentalis.text.tool_calls import RequestedCall, requested_calls
from tentalis.text.tool_output import head_and_tail, readable_text

if TYPE_CHECKING:
    from tentalis.agents.environments.mcp_sessions import McpSessions

log = logging.getLogger(__name__)

PYTHON = str(Path(sys.executable).resolve())
WORK, INPUT = "work", "input"
"""Folders of an episode: the policy's, and that of code and arguments, which it cannot write to."""


class ToolcallData(VerifierData):
    """The reference answer, and the reward of an answer that is not it. `encourage_calls`: ReTool's rule, where a wrong
    answer costs less the more calls were made: min(-0.6, -1 + 0.05 * (calls - 2))."""

    answer: str | None = None
    wrong: float = 0.0
    encourage_calls: bool = False


class ToolcallEnvironment:
    """See the module docstring. Raises BadTools or WallMissing."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._wall = options.wall()
        self._file = ToolFile() if options.tools is None else read_tools(options.tools, options.tool_mapping)
        self._tools = {tool.name: tool for tool in self._file.tools}
        self._home = None if options.tools is None else options.tools.resolve().parent
        self._folder: Path | None = None
        self._servers: McpSessions | None = None
        self._data = ToolcallData()
        self._answer: str | None = None
        self._calls = self._refused = 0

    @property
    def wall(self) -> str:
        """See Environment.wall."""
        return self._wall.name

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: the task's messages with the list of tools in the system message."""
        self._answer, self._calls, self._refused = None, 0, 0
        self._data = episode_data(task, ToolcallData)
        try:
            self._folder = new_folder()
            (self._folder / WORK).mkdir()
            (self._folder / INPUT).mkdir()
        except OSError as error:
            raise EnvironmentFault(f"no folder for the episode: {error}") from error
        if self._file.mcp:
            from tentalis.agents.environments.mcp_sessions import McpSessions  # the SDK takes a second to load

            self._servers = McpSessions(self._file.mcp, self._started)
            await self._servers.open([*self._tools, *([PYTHON_TOOL] if self._file.python else [])])
        return Observation(with_tools(task.messages, self.tool_schemas()))

    def _started(self, server: McpServer) -> RunningCommand:
        assert self._folder is not None and self._home is not None and server.command is not None
        limits = Limits(cpu_s=server.cpu_s, memory_mb=server.memory_mb, network=server.network)
        readable = (self._home, *(self._home / folder for folder in server.readable))
        return self._wall.start(self._command(server.command), self._folder / WORK, limits, readable=readable)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """See OffersTools.tool_schemas."""
        signatures = [tool.signature for tool in self._file.tools]
        if self._file.python is not None:
            signatures.append(self._file.python.signature)
        if self._servers is not None:
            signatures += [dict(tool.signature) for tool in self._servers.tools.values()]
        return signatures

    async def step(self, action: str) -> Transition:
        """See Environment.step."""
        requested = requested_calls(action)
        if not requested:
            self._answer = action
            return Transition(done=True)
        made: list[ToolCall] = []
        for number, call in enumerate(requested):
            output = await self._carried_out(call, number)
            made.append(ToolCall(name=call.name or "?", arguments=json.dumps(dict(call.arguments)), result=output))
        return Transition(after_calls(made), tool_calls=tuple(made))

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Transition:
        """See OffersTools.call_tool."""
        output = await self._carried_out(RequestedCall(name, arguments), 0)
        call = ToolCall(name=name, arguments=json.dumps(dict(arguments)), result=output)
        return Transition(Observation((Message(role="tool", content=output),)), tool_calls=(call,))

    async def answer(self, text: str) -> Transition:
        """See OffersTools.answer."""
        self._answer = text
        return Transition(done=True)

    async def _carried_out(self, call: RequestedCall, number: int) -> str:
        problem = call_problem(call, number, self._parameters())
        if problem is None and call.name == PYTHON_TOOL and self._file.python is not None:
            problem = import_problem(call.arguments["code"], self._file.python.rules)
        if problem is not None:
            self._refused += 1
            return head_and_tail(f"error: {problem}", SHOWN_CHARACTERS)
        self._calls += 1
        if self._servers is not None and call.name in self._servers.tools:
            return shown_text(await self._servers.call(call.name, call.arguments))
        tool, stop = self._tools.get(call.name), threading.Event()
        try:
            output = await run_stoppable(lambda: self._run(tool, call.arguments, stop), stop.set)
            return shown(output, SHOWN_CHARACTERS)
        except (SandboxFault, OSError) as error:
            raise EnvironmentFault(str(error)) from error

    def _parameters(self) -> dict[str, Mapping[str, object]]:
        """Returns the JSON schema of the arguments of each tool."""
        found: dict[str, Mapping[str, object]] = {name: tool.parameters for name, tool in self._tools.items()}
        if self._file.python is not None:
            found[PYTHON_TOOL] = PYTHON_SIGNATURE_PARAMETERS
        if self._servers is not None:
            found |= {name: tool.parameters for name, tool in self._servers.tools.items()}
        return found

    def _run(self, tool: Tool | None, arguments: Mapping[str, object], stop: threading.Event) -> CommandOutput:
        assert self._folder is not None, "step before reset"
        work, given = self._folder / WORK, self._folder / INPUT
        if tool is None:
            script = given / "main.py"
            script.write_text(str(arguments["code"]), encoding="utf-8", errors="replace")
            command = [PYTHON, "-I", "-u", str(script)]
            assert self._file.python is not None
            time_s = self._file.python.timeout_s
            limits = Limits(time_s=time_s, cpu_s=int(time_s) + 1, memory_mb=self._file.python.memory_mb)
            return self._wall.run(command, work, limits, readable=(given,), stop=stop)
        stdin = given / "arguments.json"
        stdin.write_text(json.dumps(dict(arguments)), encoding="utf-8")
        limits = Limits(
            time_s=tool.timeout_s, cpu_s=int(tool.timeout_s) + 1, memory_mb=tool.memory_mb, network=tool.network
        )
        readable = (given,) if self._home is None else (given, self._home)
        command = self._command(tool.command)
        return self._wall.run(command, work, limits, stdin=stdin, readable=readable, stop=stop)

    def _command(self, command: Sequence[str]) -> list[str]:
        """Returns a command with the files of the tool file's folder in full, and this Python for `python`."""
        words = [PYTHON if word == "python" and not index else word for index, word in enumerate(command)]
        if self._home is None:
            return words
        return [str(self._home / word) if (self._home / word).is_file() else word for word in words]

    async def score(self) -> Mapping[str, float]:
        """See Environment.score."""
        parts = {"calls": float(self._calls), "refused_calls": float(self._refused)}
        return parts | answer_parts(self._data, self._answer, self._calls)

    async def close(self) -> None:
        """See Environment.close: ends the servers and removes the folder."""
        if self._servers is not None:
            await self._servers.close()
            self._servers = None
        if self._folder is not None:
            await asyncio.to_thread(remove_folder, self._folder)
            self._folder = None


def answer_parts(data: ToolcallData, answer: str | None, calls: float) -> dict[str, float]:
    """Returns the reward of an answer after `calls` calls and its parts; nothing without a reference."""
    if data.answer is None:
        return {}
    stated = None if answer is None else stated_answer(answer) or answer.strip()
    right = stated is not None and same_latex(stated, data.answer)
    wrong = min(-0.6, -1.0 + 0.05 * (calls - 2)) if data.encourage_calls else data.wrong
    return {"answer": float(right), "reward": 1.0 if right else max(-1.0, wrong)}


def shown_text(output: bytes) -> str:
    """Returns what the policy sees of the output of a tool: readable, head and tail."""
    return head_and_tail(readable_text(output).strip(), SHOWN_CHARACTERS) or "[no output]"
