"""The shell of an episode: each command is a separate process behind the wall, and the shell's state lives on.

Before a command, bash reads the state that the last one left: folder, variables, functions, aliases, options. After
it, bash writes the state again. So every command ends with all that it started, a command that is stopped loses only
its own changes of the state, and nothing that a command does to the shell ends the episode.
"""

import shlex
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tentalis.agents.sandbox import CommandOutput, Limits, Wall

PATH = "/usr/local/bin:/usr/bin:/bin"
FILES, STATE = "files", "state"
"""Folders of the agent: the files of its task, and the state of its shell."""

_SHELL = r"""
__tentalis_state=$1 __tentalis_command=$2
set --
shopt -s expand_aliases
__tentalis_save() {
  __tentalis_set=$(set +o; shopt -p; umask -p; alias -p; declare -p IFS)
  set +eux
  local IFS=$' \t\n'
  {
    printf 'cd -- %q\n' "$PWD"
    for __tentalis_name in $(compgen -v); do
      case $__tentalis_name in
        __tentalis_*|BASH*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HIST*|HOST*|IFS|LINENO|MACHTYPE) ;;
        OPTERR|OPTIND|OSTYPE|PIPESTATUS|PPID|PS4|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_) ;;
        *) declare -p "$__tentalis_name" ;;
      esac
    done
    declare -f
    printf '%s\n' "$__tentalis_set"
  } >"$__tentalis_state.new"
  command -p mv -f -- "$__tentalis_state.new" "$__tentalis_state"
}
trap '{ __tentalis_save; } 2>/dev/null' EXIT
{ . "$__tentalis_state"; } 2>/dev/null
eval "$__tentalis_command"
{ __tentalis_status=$?; trap '{ __tentalis_save; } 2>/dev/null' EXIT; } 2>/dev/null
exit $__tentalis_status
"""


class CommandStops:
    """Stops a series of commands, each with its own event (see Wall.run)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._event = threading.Event()

    def event(self) -> threading.Event:
        """Returns the event of the next command."""
        with self._lock:
            self._event = threading.Event()
            if self._requested:
                self._event.set()
            return self._event

    def request(self) -> None:
        """Stops the command that runs, and each further one when it begins."""
        with self._lock:
            self._requested = True
            self._event.set()


class TerminalShell:
    """A shell in `folder`, which is the agent's and must have the folders FILES and STATE. `readable`: see Wall.run."""

    def __init__(self, wall: Wall, folder: Path, limits: Limits, readable: Sequence[Path] = ()) -> None:
        self._wall = wall
        self._readable = readable
        self._folder = folder
        self._limits = limits
        self._state = folder / STATE / "shell"

    def begin(self, start: Path, variables: Mapping[str, str]) -> None:
        """Writes the first state: the folder `start` and exported variables. Call it before the first command."""
        exported = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        self._state.write_text("\n".join([*exported, f"cd -- {shlex.quote(str(start))}", ""]), encoding="utf-8")

    def run(self, command: str, stop: CommandStops) -> CommandOutput:
        """Runs a command. Raises SandboxFault."""
        words = ["/bin/bash", "--noprofile", "--norc", "-c", _SHELL, "bash", str(self._state), command]
        return self._wall.run(words, self._folder, self._limits, readable=self._readable, stop=stop.event())


def agent_variables(home: Path, temporary: Path) -> dict[str, str]:
    """Returns the variables of every shell of an agent."""
    return {
        **clean_variables(home, temporary),
        "GIT_AUTHOR_NAME": "agent",
        "GIT_AUTHOR_EMAIL": "agent@localhost",
        "GIT_COMMITTER_NAME": "agent",
        "GIT_COMMITTER_EMAIL": "agent@localhost",
    }


def only_with(variables: Mapping[str, str]) -> list[str]:
    """Returns the first words of a command that runs with these variables and no others."""
    return ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in variables.items())]


def clean_variables(home: Path, temporary: Path) -> dict[str, str]:
    """Returns the variables of programs that must not depend on files in the current folder or in a home."""
    return {
        "PATH": PATH,
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "GIT_CONFIG_NOSYSTEM": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
