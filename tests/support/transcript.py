"""Executes the transcripts of a page: its fenced blocks ```console, in their order, in one shell.

A line that begins with `$ ` is a command, `> ` continues it. The lines after it are what it prints, on stdout and
stderr: `...` stands for any text, also of several lines, and spaces count once. A command without shown lines may print
anything. Each command ends with 0, except where the next command is `echo $?`. A block of another kind, such as
```console NAME, is not executed here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.support import ROOT

_BLOCK = re.compile(r"^( *)```console *\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_END = "__end of a command__"
_CODE = "echo $?"
SKIPPED = " WARNING tentalis.kafka.skipped: "
"""In the lines about undecodable records."""


class PageMismatch(AssertionError):
    """A command of a page does not do what the page shows."""


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command with the output that the page shows; None: it shows none."""

    text: str
    shows: str | None = None

    def check(self, printed: str) -> None:
        """Raises PageMismatch if it printed something else than the page shows. Warnings about undecodable records are
        left out: other tests write such records to a shared broker."""
        printed = "".join(line for line in printed.splitlines(keepends=True) if SKIPPED not in line)
        if self.shows is not None and not _pattern(self.shows).fullmatch(_words(printed)):
            raise PageMismatch(f"`{self.text}` printed\n{printed}\nand the page shows\n{self.shows}")


def commands_of(page: Path) -> list[ShownCommand]:
    """Returns the commands of a page in their order."""
    return [
        command
        for _, block in _BLOCK.findall(page.read_text(encoding="utf-8"))
        for command in _commands(textwrap.dedent(block))
    ]


def _commands(block: str) -> list[ShownCommand]:
    found: list[ShownCommand] = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        first, *rest = part.rstrip("\n").splitlines()
        while rest and rest[0].startswith("> "):
            first += "\n" + rest.pop(0)[2:]
        found.append(ShownCommand(first, "\n".join(rest) if rest else None))
    return found


def _words(text: str) -> str:
    return " ".join(text.split())


def _pattern(shown: str) -> re.Pattern[str]:
    # A `...` beside a space may also stand for nothing.
    parts = [re.escape(part.strip()) for part in _words(shown).split("...")]
    return re.compile(r"\s*.*?\s*".join(parts), re.DOTALL)


class PageShell:
    """bash in a folder, with `tentalis` on its PATH; variables and the working folder last from command to command.

    `more`: arguments that a subcommand of `tentalis` gets in addition, such as `--policy-model` for `up`.
    """

    def __init__(
        self, folder: Path, env: Mapping[str, str] | None = None, more: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        tools = folder / "bin"
        tools.mkdir(parents=True)
        cases = "".join(f'  {name}) set -- "$@" {" ".join(given)} ;;\n' for name, given in (more or {}).items())
        program = tools / "tentalis"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in\n{cases}esac\nexec "{sys.executable}" -m tentalis.cli "$@"\n', encoding="utf-8"
        )
        program.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TENTALIS_")}
        kept |= {name: os.environ[name] for name in ("TENTALIS_CACHE",) if name in os.environ}
        path = f"{tools}:{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
        (folder / "work").mkdir()
        self.folder = folder / "work"
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            cwd=self.folder,
            env=kept | {"PATH": path, "PYTHONPATH": str(ROOT), "LC_ALL": "C"} | dict(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )

    def __enter__(self) -> PageShell:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the shell."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.close()
        self._bash.stdout.close()
        self._bash.wait(30)

    def run(self, command: str, code: str = "?") -> tuple[int, str]:
        """Runs a command; its exit code, and what it printed. `code`: the exit code that `$?` has before."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        before = f"(exit {code})\n" if code != "?" else ""
        self._bash.stdin.write(f"{{ {before}{command}\n}} < /dev/null; printf '\\n{_END}%d\\n' $?\n")
        self._bash.stdin.flush()
        printed: list[str] = []
        for line in self._bash.stdout:
            if line.startswith(_END):
                return int(line.removeprefix(_END)), "".join(printed)
            printed.append(line)
        raise PageMismatch(f"`{command}` ended the shell: {''.join(printed)}")

    def follow(self, commands: Sequence[ShownCommand]) -> None:
        """Runs commands and compares what they print. Raises PageMismatch."""
        code = 0
        for command, following in zip(commands, [*commands[1:], ShownCommand("")], strict=True):
            code, printed = self.run(command.text, str(code))
            if code and following.text != _CODE:
                raise PageMismatch(f"`{command.text}` ended with {code}:\n{printed}")
            command.check(printed)
