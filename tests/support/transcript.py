"""The transcripts of pages, which tests execute: fenced blocks ```console or ```console NAME.

A line that begins with `$ ` is a command for bash; `> ` continues it, and so does the line after a `\\`. `exit N` names
its exit code, which is 0 otherwise. All other lines are what it prints on stdout and stderr; spaces count once. A
command without shown lines may print anything.

Blocks without a name show all that a command prints, and `...` stands for any text, also of several lines. They are one
session: commands of the page in their order, in one shell. Blocks with a NAME are run by the test of that name, such as
a fault of the drill, several of one name in their order; each line that they show is a part of what is printed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from types import TracebackType

from tests.support import ROOT

_BLOCK = re.compile(r"^( *)```console *([a-z0-9-]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"exit (\d+)")
_END = "__end of a command__"
SKIPPED = " WARNING tentalis.kafka.skipped: "
"""In the lines about undecodable records."""


class PageMismatch(AssertionError):
    """A command of a page does not do what the page shows."""


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command with the lines that the page shows and its exit code. `whole`: the lines are all that it prints."""

    text: str
    shows: tuple[str, ...] = ()
    code: int = 0
    whole: bool = True

    def check(self, code: int, printed: str) -> None:
        """Raises PageMismatch if it ended or printed otherwise than the page shows. Warnings about undecodable records
        are left out: other tests write such records to a shared broker."""
        if code != self.code:
            raise PageMismatch(f"`{self.text}` ended with {code}, the page says {self.code}:\n{printed[-3000:]}")
        printed = "".join(line for line in printed.splitlines(keepends=True) if SKIPPED not in line)
        if self.whole:
            shown = "\n".join(self.shows)
            if shown and not _pattern(shown).fullmatch(_words(printed)):
                raise PageMismatch(f"`{self.text}` printed\n{printed}\nand the page shows\n{shown}")
            return
        for part in self.shows:
            if _words(part) not in _words(printed):
                raise PageMismatch(f"`{self.text}` does not print {part!r}:\n{printed[-3000:]}")


def transcripts(page: Path) -> dict[str, list[ShownCommand]]:
    """Returns the commands of a page by the name of their blocks, "" for those without a name."""
    found: dict[str, list[ShownCommand]] = {}
    for _, name, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        found.setdefault(name, []).extend(_commands(page, name, textwrap.dedent(block)))
    return found


def commands_of(page: Path, name: str = "") -> list[ShownCommand]:
    """Returns the commands of the blocks of one name."""
    return transcripts(page)[name]


def _commands(page: Path, name: str, block: str) -> list[ShownCommand]:
    before, *parts = re.split(r"^\$ ", re.sub(r" *\\\n *", " ", block), flags=re.MULTILINE)
    assert not before.strip(), f"{page.name}: {before.strip()!r} comes before any command"
    found: list[ShownCommand] = []
    for part in parts:
        first, *rest = part.rstrip("\n").splitlines()
        while rest and rest[0].startswith("> "):
            first += "\n" + rest.pop(0)[2:]
        codes = [int(named[1]) for line in rest if (named := _EXIT.fullmatch(line.strip()))]
        shows = tuple(line for line in rest if line.strip() and not _EXIT.fullmatch(line.strip()))
        found.append(ShownCommand(first.strip(), shows, codes[0] if codes else 0, whole=not name))
    return found


def _words(text: str) -> str:
    return " ".join(text.split())


def _pattern(shown: str) -> re.Pattern[str]:
    # A `...` beside a space may also stand for nothing.
    parts = [re.escape(part.strip()) for part in _words(shown).split("...")]
    return re.compile(r"\s*.*?\s*".join(parts), re.DOTALL)


def operator_environment(
    folder: Path, env: Mapping[str, str], more: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """Returns the variables of a shell with this checkout's `tentalis`, which is written to `folder`/bin.

    Of this process' TENTALIS_ variables they have the download cache alone. `more`: see PageShell.
    """
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    cases = "".join(f'  {name}) set -- "$@" {" ".join(given)} ;;\n' for name, given in (more or {}).items())
    program = tools / "tentalis"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in\n{cases}esac\nexec "{sys.executable}" -m tentalis.cli "$@"\n', encoding="utf-8"
    )
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENTALIS_")}
    kept |= {name: os.environ[name] for name in ("TENTALIS_CACHE",) if name in os.environ}
    path = f"{tools}:{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    return kept | {"PATH": path, "PYTHONPATH": str(ROOT)} | dict(env)


class PageShell:
    """bash in a folder, with `tentalis` on its PATH; variables and the working folder last from command to command.

    `more`: arguments that a subcommand of `tentalis` gets in addition, such as `--policy-model` for `up`. `limit_s`:
    the seconds that each command may take.
    """

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str] | None = None,
        more: Mapping[str, Sequence[str]] | None = None,
        limit_s: float = 600.0,
    ) -> None:
        variables = operator_environment(folder, {"LC_ALL": "C"} | dict(env or {}), more)
        (folder / "work").mkdir()
        self.folder = folder / "work"
        self._limit_s = limit_s
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            cwd=self.folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def __enter__(self) -> PageShell:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the shell."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.close()
        self._bash.stdout.close()
        self._bash.wait(30)

    def run(self, command: str) -> tuple[int, str]:
        """Runs a command; its exit code, and what it printed."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f"{{ {command}\n}} < /dev/null; printf '\\n{_END}%d\\n' $?\n")
        self._bash.stdin.flush()
        printed: list[str] = []
        limit = Timer(self._limit_s, os.killpg, (self._bash.pid, signal.SIGKILL))
        limit.start()
        try:
            for line in self._bash.stdout:
                if line.startswith(_END):
                    return int(line.removeprefix(_END)), "".join(printed)
                printed.append(line)
        finally:
            limit.cancel()
        late = f" after {self._limit_s:g} s" if self._bash.wait() == -signal.SIGKILL else ""
        raise PageMismatch(f"`{command}` ended the shell{late}: {''.join(printed)}")

    def follow(self, commands: Sequence[ShownCommand]) -> None:
        """Runs commands and compares what they print. Raises PageMismatch."""
        for command in commands:
            command.check(*self.run(command.text))
