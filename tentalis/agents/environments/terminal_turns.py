"""The command in a policy's turn: the first fenced block, or `<command>`. `<done>` ends the episode. Pure."""

import re
from dataclasses import dataclass
from typing import Any

DONE = "<done>"
LONGEST_COMMAND = 64 * 1024
"""Bytes of a command; the operating system passes at most twice as many."""
THOUGHT = re.compile(r"\A.*</think>", re.DOTALL)
# A block that is not closed goes to the end of the turn: a stop string may have taken its end.
BLOCK = re.compile(
    r"^[ \t]*```(?:bash|sh|shell|console)?[ \t]*\n(?P<fenced>.*?)(?:^[ \t]*```[ \t]*$|\Z)"
    r"|<command>(?P<tagged>.*?)(?:</command>|\Z)",
    re.DOTALL | re.MULTILINE,
)
TOO_LONG = f"A command has at most {LONGEST_COMMAND} bytes, and no zero byte."
INSTRUCTIONS = f"""You work in a terminal. In each turn, write one command for bash in a fenced block:

```bash
ls -la
```

You then see its output. Folder, variables and functions live on between commands; processes end with their command.
There is no network and nobody to ask, and editors that need a screen do not work. When the task is finished, write
{DONE} outside of a block."""
BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in a shell and returns its output. Folder, variables and functions live on "
        "between calls; processes end with their call. There is no network.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
"""The shell as a tool."""
NO_COMMAND = f"No command found. Write one command in a ```bash block, or {DONE} if the task is finished."


@dataclass(frozen=True, slots=True)
class TerminalTurn:
    """A turn of the policy. `problem`: the reason why there is no command to run, for the policy. `left_out`: further
    commands of the turn, which are not run."""

    command: str | None
    done: bool
    problem: str | None = None
    left_out: int = 0


def parsed_turn(text: str) -> TerminalTurn:
    """Returns the command of a turn, and True for `done` if it ends the episode. Thoughts are passed over."""
    said = THOUGHT.sub("", text)
    blocks = [(match["fenced"] or match["tagged"] or "").strip("\n") for match in BLOCK.finditer(said)]
    done = DONE in BLOCK.sub("", said)
    commands = [block for block in blocks if block.strip()]
    if not commands:
        return TerminalTurn(None, done, None if done else NO_COMMAND)
    return command_turn(commands[0], done and len(commands) == 1, len(commands) - 1)


def command_turn(command: str, done: bool = False, left_out: int = 0) -> TerminalTurn:
    """Returns the turn that runs a command; one with a problem if the command cannot be run."""
    command = command.encode(errors="replace").decode()  # without halves of surrogate pairs
    if "\0" in command or len(command.encode()) > LONGEST_COMMAND:
        return TerminalTurn(None, False, TOO_LONG)
    return TerminalTurn(command, done, left_out=left_out)
