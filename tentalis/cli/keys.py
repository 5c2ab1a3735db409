"""`tentalis keys`: API keys of the gateway."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import DryRun, Yes, ask, variable_option
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_text, show
from tentalis.cli.shared.settings import gateway_url, resolve_settings
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

USAGE = ("key", "user", "label", "day", "requests", "refused", "tokens", "tokens_per_day", "left")
# Values of a limit besides numbers: that of the gateway, and no limit.
DEFAULT, NONE = "default", "none"

app = typer.Typer(
    help="API keys of the gateway: create, limit, list, revoke, usage. Changes take effect within two seconds.",
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
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="Limit of this key, such as tokens_per_day=1000000; repeatable. Default: those of the gateway.",
        ),
    ] = None,
    dry_run: DryRun = False,
    keys: File = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Creates a key and prints it on stdout. The file keeps only its hash."""
    from tentalis.gateway.http import keys as core

    path = _path(keys)
    limits, _ = _limits(limit or ())
    scopes = [core.Scope(each.value) for each in scope or (ScopeName.CHAT, ScopeName.FEEDBACK)]
    names = [scope.value for scope in scopes]
    if dry_run:
        typer.echo(
            f"would create a key with the scopes {', '.join(names)} for {user or 'any user'} in {path}", err=True
        )
    key = None if dry_run else core.create(path, scopes, user, label, limits)
    if output is not OutputFormat.TABLE:
        print_data(output, {"key": key, "user": user, "scopes": names, "label": label, "limits": limits})
    elif key is not None:
        print_text(key)
    if dry_run:
        return
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
            "limits": _written(key.limits) if output is OutputFormat.TABLE else key.limits,
            "created": _day(key.created),
            "revoked": None if key.revoked is None else _day(key.revoked),
        }
        for key in (load(path) if path.exists() else ())
    ]
    show(output, ("id", "user", "scopes", "label", "limits", "created", "revoked"), rows)


@app.command(short_help="Change the limits of a key.")
def limit(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as listed.")],
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...",
            help="New limits, named as in `limits:` of the gateway's file. VALUE: a number; default, the gateway's; or "
            "none, for tokens_per_day.",
        ),
    ],
    dry_run: DryRun = False,
    yes: Yes = False,
    keys: File = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Changes limits of one key, in place of those of the gateway. They hold within two seconds."""
    from tentalis.gateway.http import keys as core

    path = _path(keys)
    limits, removed = _limits(values)
    missing = _missing(path, identifier)
    active = (key for key in (core.load(path) if path.exists() else ()) if key.revoked is None)
    found = next((key for key in active if key.id == identifier), None)
    if found is None:
        raise missing
    if not dry_run and not yes:
        ask(f"Set {' '.join(values)} for {identifier}?")
    changed = core.new_limits(found, limits, removed) if dry_run else core.set_limits(path, identifier, limits, removed)
    if changed is None:
        raise missing
    if output is not OutputFormat.TABLE:
        print_data(output, {"id": identifier, "limits": changed})
    typer.echo(f"{' '.join(values)} {'would be' if dry_run else 'is'} set for {identifier}", err=True)


@app.command(short_help="Show the usage of keys at a gateway.")
def usage(
    days: Annotated[int, typer.Option("--days", min=1, max=31, help="UTC days to show, with today.")] = 1,
    gateway: Annotated[
        str | None,
        variable_option(
            variables.URL, "--gateway", text="URL of the gateway. Default: the local stack's, else port 8200."
        ),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the requests and tokens of each key per UTC day, and what is left of its budget of today, at one gateway.

    TENTALIS_API_KEY holds the key to ask with, if the gateway requires one. A key sees its own usage, and one with the
    scope admin and without a user sees that of all keys.
    """
    from tentalis.ops.key_usage import read_usage

    home = resolve_settings(join_stack=False).home
    found = read_usage(gateway_url(gateway, home), variables.API_KEY.read(), days)
    if output is not OutputFormat.TABLE:
        print_data(output, found.model_dump(mode="json"))
        return
    rows = [
        {
            "key": key.key or None,
            "user": key.user,
            "label": key.label or None,
            **day.model_dump(),
            "tokens_per_day": key.limits.tokens_per_day,
            "left": key.tokens_left if day.day == found.day else None,
        }
        for key in found.keys
        for day in key.days
    ]
    show(output, USAGE, rows)


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
    missing = _missing(path, identifier)
    if not any(key.id == identifier and key.revoked is None for key in (core.load(path) if path.exists() else ())):
        raise missing
    if not dry_run and not yes:
        ask(f"Revoke {identifier} permanently?")
    if not dry_run and not core.revoke(path, identifier):
        raise missing
    if output is not OutputFormat.TABLE:
        print_data(output, {"id": identifier, "revoked": not dry_run})
    typer.echo(f"{identifier} {'would be' if dry_run else 'is'} revoked", err=True)


def _missing(path: Path, identifier: str) -> CommandError:
    return CommandError(f"{path} has no active key {identifier}; `tentalis keys list` lists the keys")


def _limits(words: Sequence[str]) -> tuple[dict[str, int | None], list[str]]:
    """Returns new limits by name, and the names of those that are the gateway's again. Raises CommandError."""
    from tentalis.gateway.http.key_limits import KeyLimits, checked_overrides

    limits: dict[str, int | None] = {}
    removed: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise CommandError(f"{word}: give NAME=VALUE, such as tokens_per_day=1000000", ExitCode.USAGE)
        if name not in KeyLimits.model_fields:
            raise CommandError(
                f"there is no limit {name}; they are: {', '.join(KeyLimits.model_fields)}", ExitCode.USAGE
            )
        if value == DEFAULT:
            removed.append(name)
            continue
        try:
            limits[name] = None if value == NONE else int(value)
            checked_overrides({name: limits[name]})
        except ValueError as error:
            raise CommandError(f"{word}: {error}", ExitCode.USAGE) from error
    return limits, removed


def _written(limits: Mapping[str, int | None]) -> str | None:
    return ",".join(f"{name}={NONE if value is None else value}" for name, value in limits.items()) or None


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
