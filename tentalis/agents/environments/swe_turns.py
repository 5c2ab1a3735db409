"""The actions in a turn of swe: a plan, edits, a look at the diff, one command, the end. Pure."""

import re
from dataclasses import dataclass

from tentalis.agents.environments.terminal_turns import BLOCK, DONE, LONGEST_COMMAND, THOUGHT

_ACTION = re.compile(
    r"^[ \t]*<plan>(?P<plan>.*?)(?:</plan>|\Z)"
    r'|<edit path="(?P<path>[^"\n]+)">[ \t]*\n(?P<edit>.*?)(?:^[ \t]*</edit>|\Z)'
    r"|^[ \t]*(?P<diff><diff>)"
    rf"|{BLOCK.pattern}",
    re.DOTALL | re.MULTILINE,
)
_SEARCH, _DIVIDER, _REPLACE = "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"
_FENCE = re.compile(r"[ \t]*```\w*[ \t]*")
_SHOWN_CHARACTERS = 80
LARGEST_EDITS = 1 << 20
"""Bytes of all edits of a turn."""
INSTRUCTIONS = f"""You correct a defect in a repository of git, so that its tests and hidden ones pass. A turn may have:

<plan>
What you are going to do.
</plan>

<edit path="folder/file.py">
<<<<<<< SEARCH
lines that are in the file once
=======
the lines that replace them
>>>>>>> REPLACE
</edit>

```bash
one command for bash, run after the edits
```

<diff> shows what you have changed so far. An edit may have several SEARCH blocks; an empty one makes a new file. You
then see what the actions did. Folder, variables and functions of the shell live on between commands; processes end with
their command. There is no network and nobody to ask. When the defect is corrected, write {DONE} outside of a block.
Tests, and files that configure them, are replaced before the hidden tests run."""
NO_ACTION = f"No action found. Write a <plan>, an <edit>, a ```bash block or <diff>; or {DONE} if you are finished."
_BAD_EDIT = f"an edit needs lines between {_SEARCH}, {_DIVIDER} and {_REPLACE}"
_ZERO = "no action may have a zero byte"


@dataclass(frozen=True, slots=True)
class SweEdit:
    """A text of a file and its replacement; an empty `search` makes the file."""

    path: str
    search: str
    replace: str


@dataclass(frozen=True, slots=True)
class SweTurn:
    """The actions of a turn, in the order in which they are made. `problem`: the reason why there are none. `left_out`:
    further commands, which are not run."""

    plan: str = ""
    edits: tuple[SweEdit, ...] = ()
    diff: bool = False
    command: str | None = None
    done: bool = False
    problem: str | None = None
    left_out: int = 0


def parsed_swe_turn(text: str) -> SweTurn:
    """Returns the actions of a turn. Thoughts are passed over."""
    said = THOUGHT.sub("", text).encode(errors="replace").decode()  # without halves of surrogate pairs
    plans: list[str] = []
    edits: list[SweEdit] = []
    commands: list[str] = []
    diff = False
    for found in _ACTION.finditer(said):
        if found["plan"] is not None:
            plans.append(found["plan"].strip())
        elif found["edit"] is not None:
            blocks, outside = _blocks(found["path"], found["edit"])
            if not blocks:
                return SweTurn(problem=f"{found['path']}: {_BAD_EDIT}")
            if outside is not None:
                shown = f"{outside[:_SHOWN_CHARACTERS]!r} is outside of a block; nothing of this turn is done"
                return SweTurn(problem=f"{found['path']}: {_BAD_EDIT}: {shown}")
            edits += blocks
        elif found["diff"]:
            diff = True
        elif (block := (found["fenced"] or found["tagged"] or "").strip("\n")).strip():
            commands.append(block)
    done = DONE in _ACTION.sub("", said)
    problem = _problem(edits, commands)
    if problem is None and not (plans or edits or commands or diff or done):
        problem = NO_ACTION
    if problem is not None:
        return SweTurn(problem=problem)
    plan = "\n".join(plans)
    command = commands[0] if commands else None
    return SweTurn(plan, tuple(edits), diff, command, done and len(commands) < 2, None, max(0, len(commands) - 1))


def command_turn(command: str) -> SweTurn:
    """Returns the turn that runs a command; one with a problem if the command cannot be run."""
    command = command.encode(errors="replace").decode()
    problem = _problem([], [command])
    return SweTurn(problem=problem) if problem is not None else SweTurn(command=command)


def _blocks(path: str, edit: str) -> tuple[list[SweEdit], str | None]:
    """Returns the blocks of an edit, and the first line that belongs to none, or None. Fences are passed over."""
    blocks: list[SweEdit] = []
    outside: str | None = None
    search: list[str] = []
    replace: list[str] = []
    lines: list[str] | None = None  # those of the block that is being read: `search`, then `replace`
    for line in edit.split("\n"):
        mark = line.rstrip(" \t")
        if lines is None and mark == _SEARCH:
            lines = search = []
        elif lines is None:
            if outside is None and mark and not _FENCE.fullmatch(line):
                outside = line
        elif lines is search and mark == _DIVIDER:
            lines = replace = []
        elif lines is replace and mark == _REPLACE:
            blocks.append(SweEdit(path, "".join(search), "".join(replace)))
            lines = None
        else:
            lines.append(f"{line}\n")
    return blocks, outside if lines is None else outside or _SEARCH


def _problem(edits: list[SweEdit], commands: list[str]) -> str | None:
    texts = [*commands, *(text for edit in edits for text in (edit.path, edit.search, edit.replace))]
    if any("\0" in text for text in texts):
        return _ZERO
    if commands and len(commands[0].encode()) > LONGEST_COMMAND:
        return f"a command has at most {LONGEST_COMMAND} bytes"
    if sum(len(text.encode()) for text in texts) > LARGEST_EDITS:
        return f"the edits of a turn have at most {LARGEST_EDITS} bytes"
    return None
