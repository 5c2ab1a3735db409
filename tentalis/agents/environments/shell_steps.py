"""Steps of an environment with a shell: work in threads that can be stopped, and the records of commands."""

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from schemas.records import ToolCall
from tentalis.agents.environments.command_output import ended
from tentalis.agents.environments.protocol import EnvironmentFault, LeftFile
from tentalis.agents.environments.shown_paths import ShownPaths
from tentalis.agents.environments.stoppable import run_stoppable
from tentalis.agents.environments.terminal_shell import CommandStops
from tentalis.agents.environments.terminal_task import TaskRefused
from tentalis.agents.sandbox import CommandOutput, SandboxFault
from tentalis.text.tool_output import head_and_tail, readable_text

RECORDED_CHARACTERS = 8000
"""Characters of each stream of a command that the result records."""
T = TypeVar("T")


async def in_thread(work: Callable[[CommandStops], T]) -> T:
    """Runs work in a thread; if the caller is cancelled, its commands are stopped and its end is awaited. Raises
    EnvironmentFault if the infrastructure or the task failed, and StuckThread."""
    stop = CommandStops()
    try:
        return await run_stoppable(lambda: work(stop), stop.request)
    except (SandboxFault, TaskRefused, OSError, ValueError) as error:
        raise EnvironmentFault(str(error)) from error


def recorded_output(output: CommandOutput, paths: ShownPaths) -> dict[str, object]:
    """Returns what the result records of a command: both streams, head and tail, and how it ended."""
    streams = (
        head_and_tail(paths.shown(readable_text(stream)), RECORDED_CHARACTERS)
        for stream in (output.stdout, output.stderr)
    )
    return dict(zip(("output", "error"), streams, strict=True)) | {
        "exit_code": output.exit_code,
        "ending": ended(output),
    }


def cut_streams(name: str, output: CommandOutput, paths: ShownPaths, limit: int) -> tuple[LeftFile, ...]:
    """Returns the whole streams of a command, `name`.out and `name`.err, of which `recorded_output` has only a part."""
    texts = {f"{name}.out": output.stdout, f"{name}.err": output.stderr}
    shown = {file: paths.shown(readable_text(stream)) for file, stream in texts.items()}
    return tuple(
        LeftFile.of(file, "text/plain; charset=utf-8", text.encode(), limit)
        for file, text in shown.items()
        if len(text) > RECORDED_CHARACTERS
    )


def recorded_call(name: str, arguments: Mapping[str, object], result: Mapping[str, object] | None) -> ToolCall:
    """Returns the record of a call with JSON texts of its arguments and its result."""
    recorded = None if result is None else json.dumps(dict(result), ensure_ascii=False)
    return ToolCall(name=name, arguments=json.dumps(dict(arguments), ensure_ascii=False), result=recorded)
