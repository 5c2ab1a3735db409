"""The transcripts of the operations pages: fenced blocks ```console NAME, which the drill executes.

A line that begins with `$ ` is a command for bash; a command that ends with `&` runs in the background. Each other line
must be a part of what the command before it prints, spaces aside; `exit N` names its exit code, which is 0 otherwise.
A block with the name of a fault is its way back; several blocks of one name are run in their order.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.drill.shell import Shell
from tests.support import ROOT

PAGES = ROOT / "docs" / "operations"
_BLOCK = re.compile(r"^( *)```console +([a-z0-9-]+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"exit (\d+)")


class NotAsWritten(AssertionError):
    """A command of a page does not do what the page says."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a transcript, with its exit code and the parts of its output that the page shows."""

    text: str
    code: int
    shows: tuple[str, ...]


def transcripts(page: Path) -> dict[str, list[Command]]:
    """Returns the commands of a page by the name of their blocks."""
    found: dict[str, list[Command]] = {}
    for _, name, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        found.setdefault(name, []).extend(_commands(name, textwrap.dedent(block)))
    return found


def _commands(name: str, block: str) -> list[Command]:
    found: list[Command] = []
    for line in re.sub(r" *\\\n *", " ", block).splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:].strip(), 0, ()))
            continue
        if not line.strip():
            continue
        assert found, f"{name}: {line!r} comes before any command"
        last = found.pop()
        code = _EXIT.fullmatch(line.strip())
        shown = last.shows if code else (*last.shows, " ".join(line.split()))
        found.append(Command(last.text, int(code[1]) if code else last.code, shown))
    return found


def follow(commands: list[Command], shell: Shell) -> None:
    """Runs the commands of a transcript. Raises NotAsWritten."""
    for command in commands:
        if command.text.endswith("&"):
            shell.begin(command.text[:-1])
            continue
        done = shell.run(command.text)
        missing = [part for part in command.shows if part not in " ".join(done.says.split())]
        if done.code != command.code or missing:
            raise NotAsWritten(
                f"`{command.text}` ended with {done.code}, the page says {command.code}"
                + "".join(f"; it does not print {part!r}" for part in missing)
                + f":\n{done.says[-3000:]}"
            )
