"""`tentalis groups skip`: moves a consumer group past records that its application cannot process."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, CarryOut, DryRun
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_text, show
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from schemas.wire.codec import Codec
    from tentalis.kafka.topology import Application
    from tentalis.ops.groups.skip import PartitionSkip, Positions
    from tentalis.service.settings import Settings

COLUMNS = ("topic", "partition", "position", "first", "until", "records", "commit", "reason")


def skip(
    group: Annotated[str, typer.Argument(help="Consumer group, with or without `tentalis-`; exit code 5 names it.")],
    to: Annotated[
        int | None,
        typer.Option("--to", min=0, help="Skip every record before this offset of one partition.", show_default=False),
    ] = None,
    until_good: Annotated[
        bool,
        typer.Option(
            "--until-good", help="Skip undecodable records, past the place where it stopped, to the next good one."
        ),
    ] = False,
    topic: Annotated[str | None, typer.Option("--topic", help="Only this input topic.", show_default=False)] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="Only this partition.", show_default=False)
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Why the records are skipped; stored in their dead letters.")
    ] = "skipped by an operator",
    dry_run: DryRun = False,
    yes: CarryOut = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Moves a group past records that its application cannot process. Shows what it would do; --yes does it.

    Each skipped record goes to its dead-letter topic, byte for byte, and can be replayed from there. The group's
    application must be stopped.
    """
    from tentalis.kafka.codec import make_codec
    from tentalis.ops.groups.skip import carry_out, plan_skip

    if (to is None) != until_good:
        raise CommandError("give either --to OFFSET or --until-good", ExitCode.USAGE)
    name, application = _application(group)
    if topic is not None and topic not in application.consumes:
        raise CommandError(f"{name} does not read {topic}: it reads {', '.join(application.consumes)}", ExitCode.USAGE)
    names = application.consumes if topic is None else (topic,)
    if to is not None and (partition is None or len(names) != 1):
        raise CommandError("--to needs --partition, and --topic if the group reads several", ExitCode.USAGE)
    with reached(bootstrap) as settings:
        codec = make_codec(settings)
        positions = {
            place: offset
            for place, offset in _positions(settings, codec, name, application, names).items()
            if partition in (None, place[1])
        }
        planned = plan_skip(settings, codec, positions, to)
        done = yes and not dry_run
        if done and planned:
            carry_out(settings, codec, name, planned, reason)
    _report(output, name, planned, done=done)


def _application(group: str) -> tuple[str, Application]:
    from tentalis.kafka import topology

    for name in (group, f"{topology.PREFIX}-{group}"):
        for application in topology.APPLICATIONS:
            if application.group is not None and application.has_group(name):
                return name, application
    known = (each for each in topology.APPLICATIONS if each.group is not None)
    names = (f"{each.group}{f'-{each.group_by.value.upper()}' if each.group_by else ''}" for each in known)
    raise CommandError(f"no application has the group {group}; there are {', '.join(names)}", ExitCode.USAGE)


def _positions(
    settings: Settings, codec: Codec, group: str, application: Application, names: tuple[str, ...]
) -> Positions:
    """Returns the group's next offsets. Those of a trainer are in its records."""
    from tentalis.ops.groups.skip import group_positions

    if application.name == "trainer":
        from trainer.run.position import trainer_position

        found = trainer_position(settings, codec, group.removeprefix(f"{application.group}-"))
        if found is not None:
            return {(names[0], partition): offset for partition, offset in found.items()}
    return group_positions(settings, group, names)


def _report(output: OutputFormat, group: str, planned: list[PartitionSkip], *, done: bool) -> None:
    if output is not OutputFormat.TABLE:
        print_data(output, {"group": group, "done": done, "skips": [asdict(each) for each in planned]})
        return
    if not planned:
        print_text(f"nothing to skip: {group} has no such records ahead")
        return
    show(output, COLUMNS, [asdict(each) for each in planned])
    count = sum(each.records for each in planned)
    records = f"{count} record{'' if count == 1 else 's'}"
    if done:
        print_text(f"\n{records} moved to the dead letters. Start the process of {group} again")
    else:
        print_text(f"\nnothing was changed. With --yes, {records} would go to the dead letters")
