"""Every command of `tentalis` with its options, and what each does: reads, changes, or runs."""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from tentalis.cli.main import app
from tentalis.cli.shared.deferred import DeferredCommand

PROCESSES = {"topics wait", "train", "worker", "manager", "env try"}
"""With `serve NAME`: commands that run until their work is done. Their output is a log."""
INTERRUPTS = {"down", "restart", "stop"}
"""Commands that interrupt processes, without loss: they ask only on a terminal, so that scripts can use them."""
OPERATES = {"up", "start", "log-level", *INTERRUPTS}
"""Commands that change the processes of the local stack. `up` prints its plan, then a log."""
MUTATIONS = {
    "dlq drop",
    "dlq replay",
    "forget",
    "groups delete",
    "groups reset-offsets",
    "groups skip",
    "init",
    "keys limit",
    "keys revoke",
    "policy assign",
    "policy pin",
    "policy promote",
    "policy rollback",
    "policy unassign",
    "rescore",
    "runs delete",
    "sessions label",
    "state rebuild",
    "topics acls",
    "topics apply",
    "topics delete",
    "topics repartition",
    "topics trim",
}
"""Commands that change or remove something: they ask, or show a plan, unless --yes is given."""
ADDITIONS = {"import", "observe", "keys create", "produce", "profile use", "schemas register"}
"""Commands that only add, or choose, and may be repeated: they never ask, so that scripts can use them."""
READS = {
    *("attachments get", "attachments list"),
    *("config check", "config list", "config show", "profile list", "profile show"),
    *("consume", "demo", "doctor", "events", "export", "learn", "logs", "replay", "size", "status", "verify"),
    *("version", "dlq list", "dlq show", "groups describe", "groups lag", "groups list", "keys list", "keys usage"),
    *(
        "policy compare",
        "policy diff",
        "policy export",
        "policy list",
        "policy show",
        "rollouts list",
        "rollouts query",
        "rollouts show",
    ),
    *("runs compare", "runs list", "runs show", "schemas check", "schemas fingerprint", "schemas list", "schemas show"),
    *("env list", "env show", "env tasks", "env rows", "gateway tail", "sessions list", "sessions show"),
    *("topics describe", "topics diff", "topics list", "topics plan", "topics produce-rate"),
}


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command with its full name."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert isinstance(command, DeferredCommand)
        loaded = command.load()
        if isinstance(loaded, TyperGroup):
            yield from ((f"{name} {inner}", each) for inner, each in loaded.commands.items())
        else:
            yield name, loaded


LEAVES = dict(leaves())


def options(command: Any) -> dict[str, Any]:
    return {option: parameter for parameter in command.params for option in parameter.opts}
