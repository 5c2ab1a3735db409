"""`tentalis keys`: who may call the gateway."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.common import CommandError, Format, Output, resolve_settings, show

app = typer.Typer(
    help="API keys of the gateway: make, list, end. A running gateway sees a change within a second or two.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Scope(StrEnum):
    CHAT = "chat"
    FEEDBACK = "feedback"
    TASKS = "tasks"
    TRACES = "traces"
    EVENTS = "events"
    ADMIN = "admin"


File = Annotated[
    Path | None,
    typer.Option(
        "--keys", envvar="TENTALIS_KEYS", help="The file. Default: keys.json in TENTALIS_HOME.", show_default=False
    ),
]


def _path(given: Path | None) -> Path:
    return given or resolve_settings(join_stack=False).home / "keys.json"


@app.command(short_help="Make a key; it is shown this once.")
def create(
    scope: Annotated[
        list[Scope] | None,
        typer.Option("--scope", help="What it is good for; may be repeated. Default: chat, feedback."),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", help="Whose it is. Without one it may speak for any user (X-User-Id).")
    ] = None,
    label: Annotated[str, typer.Option("--label", help="For people, in the list.")] = "",
    keys: File = None,
) -> None:
    """Makes a key and prints it on stdout: only its hash is kept."""
    from tentalis.gateway import keys as core

    path = _path(keys)
    scopes = [core.Scope(each.value) for each in scope or (Scope.CHAT, Scope.FEEDBACK)]
    typer.echo(core.create(path, scopes, user, label))
    typer.echo(f"kept as a hash in {path}; this is the only time that it is shown", err=True)


@app.command("list", short_help="The keys, without their secrets.")
def list_(keys: File = None, output: Format = Output.TABLE) -> None:
    """The keys of the file."""
    from tentalis.gateway.keys import load

    path = _path(keys)
    rows = [
        {
            "id": key.id,
            "user": key.user,
            "scopes": ",".join(scope.value for scope in key.scopes),
            "label": key.label or None,
            "created": _day(key.created),
            "revoked": None if key.revoked is None else _day(key.revoked),
        }
        for key in (load(path) if path.exists() else ())
    ]
    show(output, ("id", "user", "scopes", "label", "created", "revoked"), rows)


@app.command(short_help="End a key.")
def revoke(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="As the list has it.")], keys: File = None
) -> None:
    """Ends a key for good."""
    from tentalis.gateway import keys as core

    path = _path(keys)
    if not path.exists() or not core.revoke(path, identifier):
        raise CommandError(f"{path} has no key {identifier} in use; `tentalis keys list` shows them")
    typer.echo(f"{identifier} is revoked", err=True)


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
