"""`tentalis keys`: API keys of the gateway."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import DryRun, Yes, variable_option
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_text, show
from tentalis.cli.shared.settings import resolve_settings
from tentalis.service import variables

app = typer.Typer(
    help="API keys of the gateway: create, list, revoke. A running gateway applies changes within two seconds.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class ScopeName(StrEnum):
    CHAT = "chat"
    FEEDBACK = "feedback"
    TASKS = "tasks"
    TRACES = "traces"
    EVENTS = "events"
    ADMIN = "admin"


File = Annotated[
    Path | None,
    variable_option(variables.KEYS, "--keys", text="Key file. Default: keys.json in TENTALIS_HOME."),
]


def _path(given: Path | None) -> Path:
    return given or resolve_settings(join_stack=False).home / "keys.json"


@app.command(short_help="Create a key; it is shown only once.")
def create(
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option("--scope", help="Permitted use; repeatable. Default: chat, feedback."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="User of the key. Default: any user (X-User-Id).")] = None,
    label: Annotated[str, typer.Option("--label", help="Note shown in the list.")] = "",
    dry_run: DryRun = False,
    keys: File = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Creates a key and prints it on stdout. The file keeps only its hash."""
    from tentalis.gateway.http import keys as core

    path = _path(keys)
    scopes = [core.Scope(each.value) for each in scope or (ScopeName.CHAT, ScopeName.FEEDBACK)]
    if dry_run:
        names = ", ".join(scope.value for scope in scopes)
        typer.echo(f"would create a key with the scopes {names} for {user or 'any user'} in {path}", err=True)
        return
    key = core.create(path, scopes, user, label)
    if output is OutputFormat.TABLE:
        print_text(key)
    else:
        print_data(output, {"key": key, "user": user, "scopes": [scope.value for scope in scopes], "label": label})
    typer.echo(f"its hash is stored in {path}; the key is not shown again", err=True)


@app.command("list", short_help="List the keys, without their secrets.")
def list_(keys: File = None, output: Format = OutputFormat.TABLE) -> None:
    """Lists the keys of the file, without their secrets."""
    from tentalis.gateway.http.keys import load

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


@app.command(short_help="Revoke a key.")
def revoke(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as listed.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    keys: File = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Revokes a key permanently."""
    from tentalis.gateway.http import keys as core

    path = _path(keys)
    missing = CommandError(f"{path} has no active key {identifier}; `tentalis keys list` lists the keys")
    if not any(key.id == identifier and key.revoked is None for key in (core.load(path) if path.exists() else ())):
        raise missing
    if not dry_run and not yes:
        typer.confirm(f"Revoke {identifier} permanently?", abort=True, err=True)
    if not dry_run and not core.revoke(path, identifier):
        raise missing
    if output is not OutputFormat.TABLE:
        print_data(output, {"id": identifier, "revoked": not dry_run})
    typer.echo(f"{identifier} {'would be' if dry_run else 'is'} revoked", err=True)


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
