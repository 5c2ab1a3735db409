"""`tentalis profile`: the profiles of the settings file."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import DryRun
from tentalis.cli.shared.output import Format, OutputFormat, print_data, show
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings_file import (
    AppliedSettings,
    SettingsFile,
    key_of,
    no_file,
    with_default_profile,
    write,
)

app = typer.Typer(
    help="Profiles of the settings file, one for each cluster: list them, show one, choose the default.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LISTED = ("profile", "current", "bootstrap", "namespace", "protocol")


@app.command("list", short_help="List the profiles; `current` is the one in use.")
def list_(ctx: typer.Context, output: Format = OutputFormat.TABLE) -> None:
    """Lists the profiles of the settings file. The current one is that of --profile, TENTALIS_PROFILE, or the key
    `profile` of the file."""
    settings: AppliedSettings = ctx.find_root().obj
    file = _file(settings)
    rows = []
    for name in file.profiles:
        values = {key: text for key, (text, _) in file.values(name).items()}
        rows.append(
            {
                "profile": name,
                "current": name == settings.profile,
                "bootstrap": values.get(variables.BOOTSTRAP.name),
                "namespace": values.get(variables.NAMESPACE.name),
                "protocol": values.get(variables.SECURITY_PROTOCOL.name, variables.SECURITY_PROTOCOL.default),
            }
        )
    show(output, LISTED, rows)


@app.command("show", short_help="Show the settings of a profile.")
def show_(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Default: the current profile.", show_default=False)] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the settings of a profile, and those that the file gives to every profile. Secrets are shown as ***."""
    settings: AppliedSettings = ctx.find_root().obj
    rows: list[dict[str, object]] = []
    for variable_name, (text, origin) in _file(settings).values(name or settings.profile).items():
        variable = variables.named(variable_name)
        rows.append({"key": key_of(variable), "value": variable.shown(text), "origin": origin})
    show(output, ("key", "value", "origin"), rows)


@app.command(short_help="Make a profile the default.")
def use(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the profile.")],
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Writes the default profile into the settings file. Its comments stay.

    --profile and TENTALIS_PROFILE take precedence over it."""
    file = _file(ctx.find_root().obj)
    file.chosen(name)
    text = with_default_profile(file.path.read_text(encoding="utf-8"), file.path, name)
    if not dry_run:
        write(file.path, text)
    if output is not OutputFormat.TABLE:
        print_data(output, {"profile": name, "before": file.default, "file": str(file.path), "changed": not dry_run})
    typer.echo(f"{'would use' if dry_run else 'now using'} profile {name} of {file.path}", err=True)


def _file(settings: AppliedSettings) -> SettingsFile:
    if settings.file is None:
        raise CommandError(no_file(), ExitCode.USAGE)
    return settings.file
