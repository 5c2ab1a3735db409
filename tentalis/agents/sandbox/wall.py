"""The interface of a wall: runs one command inside a folder, under limits."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Protocol

from tentalis.agents.sandbox.abandoned import mark

MIB = 1024 * 1024
SYSTEM = tuple(map(Path, ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")))
"""Folders and files of the operating system that commands may read."""


class SandboxFault(Exception):
    """A wall could not be built or its command not be started: the infrastructure failed, not the command."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one command. Memory, disk and file size in MiB, output in bytes, times in seconds.

    `memory_mb` is for all processes of the command together, `file_mb` for each file that it writes. `disk_mb` and
    `files` are for everything in its folder together. `network`: the endpoints it may connect to (`host:port`); empty:
    none.
    """

    time_s: float = 120.0
    cpu_s: int = 120
    memory_mb: int = 4096
    processes: int = 32
    open_files: int = 256
    file_mb: int = 64
    disk_mb: int = 16_384
    files: int = 500_000
    output_bytes: int = 64 * 1024
    network: tuple[str, ...] = ()


class CommandEnd(StrEnum):
    """The end of a command: by itself, at a limit of time, output or disk, or by a signal."""

    EXITED = "exited"
    TIMED_OUT = "timed_out"
    TOO_MUCH_OUTPUT = "too_much_output"
    TOO_MUCH_DISK = "too_much_disk"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """The output of a command, both streams within the limit of `Limits.output_bytes`. `exit_code` is None unless it
    ended by itself."""

    stdout: bytes
    stderr: bytes
    end: CommandEnd
    exit_code: int | None


class RunningCommand(Protocol):
    """A command that runs, with its three pipes, which are unbuffered. The caller reads and writes them."""

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its input."""
        ...

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its output."""
        ...

    @property
    def stderr(self) -> IO[bytes]:
        """The pipe from its error output."""
        ...

    def close(self) -> None:
        """Kills the command and everything that it started, waits for their end, and closes the pipes that are open.
        May be called from any thread; further calls do nothing."""
        ...


class Wall(Protocol):
    """A wall around commands. All methods may be called from several threads."""

    @property
    def name(self) -> str:
        """Name/version of the wall, as results record it."""
        ...

    @property
    def readable(self) -> Sequence[Path]:
        """Folders and files that every command may read, beside its own folder."""
        ...

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        limits: Limits,
        *,
        stdin: Path | None = None,
        readable: Sequence[Path] = (),
        stop: threading.Event | None = None,
    ) -> CommandOutput:
        """Runs a command with `folder` as its working and only writable folder. Blocks until it and everything that it
        started have ended.

        `stdin`: a readable file to read from; None: nothing to read. `readable`: further folders and files that it
        may read, beside those of the operating system and of Python. `stop`: ends the command when it is set; used for
        one command. Raises SandboxFault.
        """
        ...

    def start(
        self, command: Sequence[str], folder: Path, limits: Limits, *, readable: Sequence[Path] = ()
    ) -> RunningCommand:
        """Starts a command that runs until it ends or is closed, such as a server that speaks over its pipes.

        Everything is confined as in `run`. Of the limits, `time_s`, `output_bytes`, `disk_mb` and `files` do not apply:
        the caller closes the command and bounds what it reads. Raises SandboxFault.
        """
        ...


def command_variables(folder: Path) -> dict[str, str]:
    """Returns the environment variables of a command in a folder."""
    return {"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


_BLOCK = 512
"""Bytes of a block of `ulimit -f` in a POSIX shell."""


def limited_command(command: Sequence[str], limits: Limits, stdin: Path | None) -> list[str]:
    """Returns a command that sets the limits of the operating system and becomes `command`, which reads `stdin`."""
    return ["/bin/sh", "-c", f'{_limits(limits)}; exec "$@" <"$0"', str(stdin or "/dev/null"), *command]


def limited_server(command: Sequence[str], limits: Limits) -> list[str]:
    """Like `limited_command`, for a command that keeps the pipe of its input."""
    return ["/bin/sh", "-c", f'{_limits(limits)}; exec "$@"', "server", *command]


def _limits(limits: Limits) -> str:
    """Returns shell commands that set the limits, and the mark by which the command is found if this process is killed.
    Shells differ in the option of the mark."""
    number = mark()
    marked = ":" if number is None else f"ulimit -w {number} 2>/dev/null || ulimit -x {number}"
    return f"ulimit -t {limits.cpu_s}; ulimit -f {limits.file_mb * MIB // _BLOCK}; {marked}"
