"""`tentalis forget`: somebody leaves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.common import (
    ERROR,
    USAGE,
    Bootstrap,
    CommandError,
    Format,
    Output,
    print_json,
    print_table,
    reached,
)

if TYPE_CHECKING:
    from tentalis.forget import Report


def forget(
    session: Annotated[
        str | None, typer.Option("--session", help="Id of a conversation on the log: USER/NAME.")
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="The opaque id of a user, as tasks carry it.")] = None,
    before: Annotated[
        str | None, typer.Option("--before", help="Only what is older: RFC 3339, or 30m, 1h, 2d ago.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Only what this policy answered.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be forgotten and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait until the applications have dropped their state.")
    ] = 60.0,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """Replaces rollouts by husks and lets the applications drop live state. All that is given must hold.

    Exits with 1 if an application has not applied it yet; a second run is harmless. docs/forget.md says what is left,
    and for how long.
    """
    from tentalis.forget import NoSuchRequest, request_of
    from tentalis.forget import forget as carry_out
    from tentalis.kafka import now_ms

    now = now_ms()
    try:
        request = request_of(session, user, None if before is None else _moment(before, now), policy, now=now)
    except NoSuchRequest as error:
        raise CommandError(str(error), USAGE) from error
    with reached(bootstrap) as settings:
        if not dry_run and not yes:
            who = ", ".join(f"{name} {value}" for name, value in _named(session, user, before, policy))
            typer.confirm(f"Forget {who} on {settings.bootstrap}? This cannot be undone.", abort=True, err=True)
        report = carry_out(settings, request, dry_run=dry_run, wait=wait)
    if output is Output.JSON:
        print_json(report.as_dict())
    else:
        _print(report)
    if session is not None and not any(row.records for row in report.rows):
        typer.echo(
            f"nothing on the log is of a session {session}: is that its name there? A client's own name of a session "
            f"has its user in front of it on the log: USER/{session} (docs/gateway.md)",
            err=True,
        )
    for group, partitions in report.waiting.items():
        typer.echo(
            f"not complete: {group} has not applied the request on partitions {partitions} within {wait:g} s. "
            "Is it running, and does it keep up? Run the same command again when it does",
            err=True,
        )
    if not report.complete:
        raise typer.Exit(ERROR)


def _moment(before: str, now: int) -> int:
    from tentalis.moments import parse_moment

    try:
        return parse_moment(before, now)
    except ValueError as error:
        raise CommandError(f"--before: {error}", USAGE) from error


def _named(session: str | None, user: str | None, before: str | None, policy: str | None) -> list[tuple[str, str]]:
    given = {"session": session, "user": user, "before": before, "policy": policy}
    return [(name, value) for name, value in given.items() if value is not None]


def _print(report: Report) -> None:
    print_table(
        ("topic", "records", "what", "bytes gone by"),
        [
            (row.topic, row.records, row.done, "no time promised" if row.gone_by is None else _day(row.gone_by))
            for row in report.rows
        ],
    )
    if report.unreadable:
        print(f"\n{report.unreadable} records on the rollouts topic cannot be read: whose they are, nobody can say")
    print("\ndry run: nothing was written" if report.dry_run else f"\n{report.husks} husks written")
    print("Trained weights are not untrained; exports, reports and logs outside Kafka are not reached.")


def _day(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%MZ")
