"""Commands that are imported when they are called: `tentalis --help` imports none of them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import CommandInfo

from tentalis.cli.shared.earlier_system import replacement
from tentalis.cli.shared.errors import CommandError
from tentalis.service import stdout
from tentalis.service.exit_codes import ExitCode


class AsGiven:
    """The value of an option that needs no conversion: a text, a flag or None.

    Typer's conversion imports pydantic, which takes longer than the rest of `--help` or of a completion.
    """

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Returns the value as it was given."""
        return value


class CommandGroup(TyperGroup):
    """A group of commands whose own options are texts and flags: the help of its commands imports no pydantic."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the options of the group without Typer's conversion."""
        for each in self.get_params(ctx):
            each._runtime_param = AsGiven()  # type: ignore[attr-defined]
        _refuse_missing_values(self, ctx, args)
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class ParsedCommand(TyperCommand):
    """A command that names an option without its value, and itself with it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line. Ends with a usage error for an option whose value is missing."""
        _refuse_missing_values(self, ctx, args)
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class DeferredCommand(TyperCommand):
    """A command or group that is imported when it is first needed. `place`: `MODULE:NAME` of a function or of a
    `typer.Typer`.

    Name and short help are known without the import; everything else comes from the loaded command.
    """

    def __init__(self, name: str, place: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help, rich_markup_mode=None)
        self._place = place
        self._loaded: Any = None

    def load(self) -> Any:
        """Returns the command itself, imported at the first call."""
        if self._loaded is None:
            module, _, attribute = self._place.partition(":")
            found = getattr(import_module(module), attribute)
            if isinstance(found, typer.Typer):
                found.info.cls = CommandGroup
            else:
                function, found = found, _application()
                found.command(self.name, short_help=self.short_help)(function)
            for command in _commands(found):
                _prepare(command)
            found._add_completion = False  # options of the root command only
            self._loaded = get_command(found)
            self._loaded.name, self._loaded.short_help = self.name, self.short_help
        return self._loaded

    @property
    def commands(self) -> dict[str, Any]:
        """The commands of a group. Raises AttributeError for a single command."""
        found: dict[str, Any] = self.load().commands
        return found

    @property
    def params(self) -> list[Any]:
        """The parameters of the loaded command."""
        found: list[Any] = self.load().params
        return found

    @params.setter
    def params(self, none: list[Any]) -> None:
        """Ignores the empty list that the base class sets."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Makes the context of the loaded command, which does the parsing, help, completion and invocation.

        Raises CommandError, with the command that replaces it, for a command line of the earlier system.
        """
        replaced = None if extra.get("resilient_parsing") else replacement(self.name or "", args)
        if replaced is not None:
            raise CommandError(replaced, ExitCode.USAGE)
        return self.load().make_context(info_name, args, parent, **extra)


def _application() -> typer.Typer:
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


def _prepare(command: CommandInfo) -> None:
    """Checks the options of a command, and keeps stdout for `stdout.data()`, whatever libraries it loads."""
    command.cls = ParsedCommand
    if command.callback is not None:
        command.callback = stdout.libraries_to_stderr()(command.callback)


def _refuse_missing_values(command: TyperCommand | TyperGroup, ctx: Any, args: list[str]) -> None:
    """Ends with a usage error for an option without its value. An option of the command in the place of a value is no
    value, unless it is given as `--option=--value`."""
    if ctx.resilient_parsing:
        return
    try:
        values, _, _ = command.make_parser(ctx).parse_args([*args])
    except typer.TyperException as error:
        if getattr(error, "ctx", None) is None:  # the parser does not name its command
            ctx.fail(error.format_message())
        raise
    options = [each for each in command.get_params(ctx) if each.param_type_name == "option"]
    names = {name for each in options for name in (*each.opts, *each.secondary_opts)}
    for each in options:
        given = values.get(each.name)
        for value in given if isinstance(given, list) else [given]:
            if not isinstance(value, str) or value.partition("=")[0] not in names:
                continue
            if not any(f"{name}={value}" in args for name in each.opts):
                ctx.fail(f"Option '{each.opts[0]}' needs a value, and {value} follows it.")


def _commands(application: typer.Typer) -> Iterator[CommandInfo]:
    yield from application.registered_commands
    for group in application.registered_groups:
        if group.typer_instance is not None:
            yield from _commands(group.typer_instance)
