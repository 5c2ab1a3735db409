"""Requests of commands to the supervisor of the running stack, and waiting for their effect."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import ask_on_terminal
from tentalis.cli.shared.output import OutputFormat, first_line, show
from tentalis.cli.shared.settings import resolve_settings

if TYPE_CHECKING:
    from tentalis.local.control import Statuses

Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Processes, as `tentalis status` names them.")]
Wait = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait until it is done.")]
WAIT_S = 120.0
_POLL_S = 0.2
_STARTED = ("ready", "running", "done")
_GONE = ("failed", "halted", "crash-looping")


def state_home() -> Path:
    """Returns the state directory."""
    return resolve_settings(join_stack=False).home


def ask_stack(action: str, names: Sequence[str], level: str = "") -> Statuses:
    """Sends a request to the running stack; returns the status of the named processes. Raises CommandError."""
    from tentalis.local.control import ControlError, ControlRequest, ask
    from tentalis.local.state import StateDir

    home = state_home()
    if StateDir(home).holder() is None:
        raise CommandError(f"no stack runs in {home}; `tentalis up` starts one")
    try:
        return ask(home, ControlRequest(action, tuple(names), level))
    except ControlError as error:
        raise CommandError(str(error)) from error


def started(process: dict[str, Any]) -> bool:
    """Returns True if a process is running, ready or done. Raises CommandError if it failed, halted or is in a crash
    loop."""
    if process["state"] in _GONE:
        raise CommandError(f"{process['state']}: {first_line(process['message'])}")
    return process["state"] in _STARTED


def stopped(process: dict[str, Any]) -> bool:
    """Returns True if a process is stopped because an operator asked for it."""
    return bool(process["state"] == "stopped")


@dataclass(frozen=True, slots=True)
class ProcessChange:
    """A change of the state of processes that an operator asks for.

    Attributes:
        action: the action of the ControlRequest.
        names: the processes.
        done: returns True if a process with this status has made the change. Raises CommandError if it never will.
        timeout: seconds to wait until all are done.
        interrupts: the change interrupts running processes, so it is confirmed on a terminal.
    """

    action: str
    names: Sequence[str]
    done: Callable[[dict[str, Any]], bool]
    timeout: float = WAIT_S
    interrupts: bool = True


def carry_out(change: ProcessChange, output: OutputFormat, *, dry_run: bool, yes: bool = False) -> None:
    """Sends the request and waits until it is done; prints the states. Raises CommandError."""
    names = list(dict.fromkeys(change.names))
    before = ask_stack("status", names)
    if dry_run:
        _show(before, output, f"would {change.action}")
        return
    if change.interrupts and not yes:
        ask_on_terminal(f"{change.action.capitalize()} {', '.join(names)}?")
    after = _wait(change, names)
    if output is not OutputFormat.TABLE:
        _show(after, output, change.action)


def _show(statuses: Statuses, output: OutputFormat, action: str) -> None:
    rows = [
        {"process": name, "action": action, "state": status["state"], "pid": status["pid"]}
        for name, status in statuses.items()
    ]
    show(output, ("process", "action", "state", "pid"), rows)


def _wait(change: ProcessChange, names: Sequence[str]) -> Statuses:
    """Sends a request and waits until it is done for each process. Raises CommandError."""
    left, ended = list(names), dict[str, dict[str, Any]]()
    found = ask_stack(change.action, left)
    deadline = time.monotonic() + change.timeout
    while True:
        for name in list(left):
            try:
                if change.done(found[name]):
                    typer.echo(f"{name} is {found[name]['state']}", err=True)
                    ended[name] = found[name]
                    left.remove(name)
            except CommandError as error:
                raise CommandError(f"{name} is {error}. `tentalis logs {name}` shows its log") from error
        if not left:
            return ended
        if time.monotonic() > deadline:
            states = (f"{name} is {found[name]['state']}: {first_line(found[name]['message'])}" for name in left)
            raise CommandError(
                f"after {change.timeout:g} s, {'; '.join(states)}. `tentalis logs {' '.join(left)}` shows more"
            )
        time.sleep(_POLL_S)
        found = ask_stack("status", left)
