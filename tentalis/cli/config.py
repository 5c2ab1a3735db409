"""`tentalis config`: the settings, with their values and origins."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.output import Format, OutputFormat, print_text, show
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings_file import KEYS, AppliedSettings, key_of
from tentalis.service.variable import Variable

app = typer.Typer(
    help="Settings: every variable with its value, where the value came from, its default and its meaning.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


COLUMNS = ("name", "value", "origin", "default", "meaning", "used_by")
SHOWN = ("key", "value", "origin", "variable")


@app.command("show", short_help="Show the settings that have a value, and where each came from.")
def show_(
    ctx: typer.Context,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Only these, such as bootstrap or TENTALIS_BOOTSTRAP; defaults too."),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the settings that have a value: from the environment, or from the settings file and its profile.

    An option of a command takes precedence over both. Secrets are shown as ***."""
    settings: AppliedSettings = ctx.find_root().obj
    if keys:
        chosen = [_named(key) for key in keys]
    else:
        chosen = [each for each in variables.VARIABLES if os.environ.get(each.name) and not each.internal]
    show(output, SHOWN, [_row(each, settings) | {"variable": each.name, "key": _key(each)} for each in chosen])
    if output is OutputFormat.TABLE:
        profile = f", profile {settings.profile}" if settings.profile else ""
        typer.echo(f"settings file: {settings.file.path}{profile}" if settings.file else "no settings file", err=True)


@app.command("list", short_help="List every variable: value, origin, default, meaning.")
def list_(
    ctx: typer.Context,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lists every variable with what reads it: processes, docker-compose.yml or the tests. Secrets are shown as ***.

    Docker Compose also reads `.env` beside its file; values there are not shown."""
    settings: AppliedSettings = ctx.find_root().obj
    show(output, COLUMNS, [_row(each, settings) for each in variables.LISTED])


@app.command(short_help="Check every variable, as a process does before it starts.")
def check(ctx: typer.Context, output: Format = OutputFormat.TABLE) -> None:
    """Checks every variable, the settings file and the files that they name. Exits with 2 if a process would refuse
    one."""
    from tentalis.cli.shared.variable_checks import variable_problems

    settings: AppliedSettings = ctx.find_root().obj
    found = variable_problems()
    if output is not OutputFormat.TABLE:
        show(output, (), [{"problem": each, "origin": settings.origin(each.partition("=")[0])} for each in found])
    if found:
        raise CommandError("\n".join(f"{each}{_from(each, settings)}" for each in found), ExitCode.USAGE)
    if output is OutputFormat.TABLE:
        print_text("every setting is valid")


def _from(problem: str, settings: AppliedSettings) -> str:
    origin = settings.origins.get(problem.partition("=")[0])
    return f" (from {origin})" if origin else ""


def _row(variable: Variable[Any], settings: AppliedSettings) -> dict[str, object]:
    text = os.environ.get(variable.name)
    return {
        "name": variable.name,
        "value": variable.shown(text) if text else variable.default_shown or None,
        "origin": settings.origin(variable.name),
        "default": variable.default_shown or None,
        "allowed": variable.kind.allowed,
        "meaning": variable.meaning + (" Set by a process for its children." if variable.internal else ""),
        "used_by": variable.used_by,
    }


def _key(variable: Variable[Any]) -> str | None:
    """Returns the key of a variable in a settings file; None for one that no process reads."""
    return key_of(variable) if variable.name in variables.NAMES else None


def _named(key: str) -> Variable[Any]:
    if key in KEYS:
        return KEYS[key]
    try:
        return variables.named(key)
    except KeyError:
        raise CommandError(
            f"there is no setting {key}; `tentalis config list` shows every setting", ExitCode.USAGE
        ) from None
