"""`tentalis groups`: lists, describes, resets and deletes consumer groups, shows their lag, and skips bad records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.groups_delete import delete
from tentalis.cli.groups_skip import skip
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.options import Bootstrap, CarryOut, DryRun
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text, readable, show
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode
from tentalis.text.timestamps import written

if TYPE_CHECKING:
    from tentalis.ops.groups.core import GroupLag, ResetTarget
    from tentalis.ops.groups.learning import LearningLag

app = typer.Typer(
    help="Consumer groups of the applications: list, describe, lag, reset-offsets, skip, delete.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command(short_help="Plan or make a skip of records that cannot be processed.")(skip)
app.command(short_help="Plan or carry out the deletion of inactive groups.")(delete)

LISTED = ("group", "application", "state", "members", "records")
LAGGING = ("group", "application", "state", "records", "seconds")
LEARNING = ("policy", "rollouts", "minutes", "halves", "join", "batch", "step", "serve")
PARTITIONS = ("topic", "partition", "committed", "end", "records", "oldest unread")


@app.command("list", short_help="List the groups with their members and lag.")
def list_groups(bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Lists the groups of the broker, and those of applications that have never run (state `absent`)."""
    from tentalis.ops.groups.process import read_groups

    with reached(bootstrap) as settings:
        rows = [_row(lag) for lag in read_groups(settings)]
    show(output, LISTED, rows)


@app.command(short_help="Show the members and partitions of a group.")
def describe(
    group: Annotated[str, typer.Argument(help="Name of the group.")],
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows a group: its members, and per partition the committed offset, the end and the age of the oldest unread
    record."""
    from tentalis.ops.groups.process import read_groups
    from tentalis.text.timestamps import now_ms

    with reached(bootstrap) as settings:
        (lag,) = read_groups(settings, [group], ages=True)
    now = now_ms()
    members: list[dict[str, Any]] = [
        {
            "member": member.client_id,
            "instance": member.instance,
            "host": member.host,
            "partitions": [f"{topic}[{p}]" for topic, p in member.partitions],
        }
        for member in lag.group.members
    ]
    partitions = [
        {
            "topic": each.topic,
            "partition": each.partition,
            "committed": each.committed,
            "end": each.end,
            "records": each.records,
            "oldest unread": None if each.oldest_ms is None else written(each.oldest_ms),
        }
        for each in lag.partitions
    ]
    row = _row(lag) | {"seconds": _rounded(lag.seconds(now))}
    if output is not OutputFormat.TABLE:
        print_data(output, row | {"members": members, "partitions": partitions})
        return
    print_table(LAGGING, [[row[name] for name in LAGGING]])
    if members:
        print_text()
        heads = ("member", "instance", "host", "partitions")
        print_table(heads, [[readable(member[name]) for name in heads] for member in members])
    if partitions:
        print_text()
        print_table(PARTITIONS, [[each[name] for name in PARTITIONS] for each in partitions])


@app.command(short_help="Show the lag in records, seconds and learning units.")
def lag(
    groups: Annotated[
        list[str] | None, typer.Argument(help="Only these groups, without learning units.", show_default=False)
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Learning units of this policy only; repeatable.", show_default=False),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the lag of the groups in records and in seconds (the age of the oldest unread record; `-`: unknown), and
    the lag of each policy in learning units.

    Learning units are the rollouts that wait for training, and the minutes until a complaint that is written now
    reaches the served policy. docs/operations/consumer-groups.md defines the stages, whose seconds are shown.
    """
    from tentalis.ops.groups.learning_reader import read_learning_lags
    from tentalis.ops.groups.process import read_groups
    from tentalis.text.timestamps import now_ms

    with reached(bootstrap) as settings:
        found = read_groups(settings, groups or (), ages=True)
        now = now_ms()
        learning = [] if groups else read_learning_lags(settings, found, now, policy or ())
    rows = [_row(each) | {"seconds": _rounded(each.seconds(now))} for each in found if each.application]
    units = [_learning_row(each) for each in learning]
    if output is not OutputFormat.TABLE:
        print_data(output, {"groups": rows, "learning": units})
        return
    print_table(LAGGING, [[row[name] for name in LAGGING] for row in rows])
    if units:
        print_text()
        print_table(
            LEARNING, [["unknown" if unit[name] is None else unit[name] for name in LEARNING] for unit in units]
        )
    for unit in units:
        if unit["reason"]:
            print_text(f"{unit['policy']}: the minutes are unknown: {unit['reason']}")


@app.command("reset-offsets", short_help="Plan or commit new offsets of an inactive group.")
def reset_offsets(
    group: Annotated[str, typer.Argument(help="Name of the group.")],
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record of each partition.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="Behind the last record of each partition.")] = False,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", min=0, help="To this offset in each partition.", show_default=False)
    ] = None,
    to_time: Annotated[
        str | None,
        typer.Option(
            "--to-time", help="To the first record of this time: RFC 3339, or 30m, 1h, 2d ago.", show_default=False
        ),
    ] = None,
    shift: Annotated[
        int | None, typer.Option("--shift", help="By so many records; negative: back.", show_default=False)
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", help="Only this topic; repeatable. Default: all that the group reads."),
    ] = None,
    force: Annotated[
        str | None,
        typer.Option(
            "--force", metavar="GROUP", help="Reset GROUP although its state then disagrees with its offsets."
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: CarryOut = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the new offsets of a group; with --yes, commits them.

    Refused while the group has members, and for a group whose state (changelog) contains the records up to its offsets:
    then the state and the offsets would disagree. --force GROUP overrides the second. Offsets outside the partition are
    moved to its nearest end.
    """
    from tentalis.ops.groups.core import ResetRefused
    from tentalis.ops.groups.process import planned_reset, reset

    target = _target(to_earliest, to_latest, to_offset, to_time, shift)
    with reached(bootstrap) as settings:
        try:
            rows, reason = planned_reset(settings, group, target, topic or (), force)
        except ResetRefused as error:
            raise CommandError(str(error)) from error
        show(
            output,
            ("topic", "partition", "committed", "target", "end", "reads again", "skips"),
            [
                {
                    "topic": row.topic,
                    "partition": row.partition,
                    "committed": row.committed,
                    "target": row.target,
                    "end": row.end,
                    "reads again": max(0, row.records),
                    "skips": max(0, -row.records),
                }
                for row in rows
            ],
        )
        if reason:
            typer.echo(f"warning: {reason}", err=True)
        if dry_run or not yes:
            typer.echo(f"dry run: nothing was committed on {settings.bootstrap}; --yes commits this plan", err=True)
            return
        typer.echo(f"committed: new offsets of {group} on {reset(settings, group, rows)} partitions", err=True)


def _target(earliest: bool, latest: bool, offset: int | None, time: str | None, shift: int | None) -> ResetTarget:
    """Returns the target that the options name. Raises CommandError unless exactly one is given."""
    from tentalis.kafka.positions import Start
    from tentalis.ops.groups.core import ResetTarget

    if sum((earliest, latest, offset is not None, time is not None, shift is not None)) != 1:
        raise CommandError(
            "give exactly one of --to-earliest, --to-latest, --to-offset, --to-time and --shift", ExitCode.USAGE
        )
    if shift is not None:
        return ResetTarget(shift=shift)
    if time is not None:
        return ResetTarget(Start(at_ms=max(0, moment_of("--to-time", time))))
    return ResetTarget(Start(offset=offset) if offset is not None else Start(back=0) if latest else Start())


def _row(lag: GroupLag) -> dict[str, Any]:
    return {
        "group": lag.group.name,
        "application": lag.application or None,
        "state": lag.group.state,
        "members": len(lag.group.members),
        "records": lag.records,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _learning_row(lag: LearningLag) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": lag.policy, "rollouts": lag.rollouts, "minutes": _rounded(lag.minutes)}
    return row | {stage.name: _rounded(stage.seconds) for stage in lag.stages} | {"reason": lag.reason or None}
