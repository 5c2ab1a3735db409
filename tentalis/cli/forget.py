"""`tentalis forget`: erases a user or a session."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.options import Bootstrap, ask
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from tentalis.ops.forget import ForgetReport


def forget(
    session: Annotated[str | None, typer.Option("--session", help="Id of a session as on the log: USER/NAME.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Opaque id of a user, as in the tasks.")] = None,
    before: Annotated[
        str | None, typer.Option("--before", help="Only records older than this: RFC 3339, or 30m, 1h, 2d ago.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Only answers of this policy.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be erased and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait until the applications have deleted their state.")
    ] = 60.0,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Redacts rollouts and has the applications delete live state. A record must match all of the given options.

    Exits with 1 if an application has not applied the request yet; it is safe to run the command again.
    docs/operations/forget.md lists what remains, and for how long.
    """
    from tentalis.ops.forget import NoSuchRequest, request_of
    from tentalis.ops.forget import forget as carry_out
    from tentalis.text.timestamps import now_ms

    now = now_ms()
    try:
        request = request_of(
            session, user, None if before is None else moment_of("--before", before, now), policy, now=now
        )
    except NoSuchRequest as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    with reached(bootstrap) as settings:
        if not dry_run and not yes:
            who = ", ".join(f"{name} {value}" for name, value in _named(session, user, before, policy))
            ask(f"Forget {who} on {settings.bootstrap}? This cannot be undone.")
        report = carry_out(settings, request, dry_run=dry_run, wait=wait)
    if output is not OutputFormat.TABLE:
        print_data(output, report.as_dict())
    else:
        _print(report)
    if session is not None and not any(row.records for row in report.rows):
        typer.echo(
            f"the log has no records of session {session}. On the log, the id of a session begins with its user: "
            f"USER/{session} (docs/concepts/gateway.md)",
            err=True,
        )
    for group, partitions in report.waiting.items():
        typer.echo(
            f"incomplete: {group} has not applied the request on partitions {partitions} within {wait:g} s. "
            "Check that it runs and has no lag, then run the same command again",
            err=True,
        )
    if not report.complete:
        raise typer.Exit(ExitCode.ERROR)


def _named(session: str | None, user: str | None, before: str | None, policy: str | None) -> list[tuple[str, str]]:
    given = {"session": session, "user": user, "before": before, "policy": policy}
    return [(name, value) for name, value in given.items() if value is not None]


def _print(report: ForgetReport) -> None:
    print_table(
        ("topic", "records", "action", "bytes gone by"),
        [
            (row.topic, row.records, row.done, "no guarantee" if row.gone_by is None else _day(row.gone_by))
            for row in report.rows
        ],
    )
    if report.unreadable:
        print_text(f"\n{report.unreadable} records on the rollouts topic cannot be decoded: their users are unknown")
    print_text("\ndry run: nothing was written" if report.dry_run else f"\n{report.husks} rollouts redacted")
    print_text("Not covered: weights that are already trained, and exports, reports and logs outside Kafka.")


def _day(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%MZ")
