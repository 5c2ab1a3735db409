"""`tentalis topics`: compares the topics on the broker with schemas/topics.yaml, and applies the difference."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schemas import keyed_partitions
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.options import Bootstrap, CarryOut, DryRun, Yes, ask, variable_option
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text, show
from tentalis.cli.shared.settings import reached, resolve_settings
from tentalis.cli.shared.startup import configure_logging
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from schemas.wire.avro import AvroSchema
    from tentalis.kafka.admin import Change
    from tentalis.kafka.topic_id_log import RecordedTopics
    from tentalis.service.settings import Settings

app = typer.Typer(
    help="Topics and ACLs: list them, compare them with schemas/topics.yaml, apply the difference.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Replication = Annotated[
    int | None,
    variable_option(variables.REPLICATION_FACTOR, "--replication-factor"),
]


class OnRisk(StrEnum):
    APPLY = "apply"
    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The work of `apply`: changes of topics, schemas to publish, and the topics whose ids it records."""

    changes: list[Change]
    schemas: list[AvroSchema]
    unrecorded: list[str]

    @property
    def count(self) -> int:
        """The number of single changes."""
        return len(self.changes) + len(self.schemas) + bool(self.unrecorded)


@app.command("list", short_help="Lists all topics of the broker.")
def list_topics(bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Lists all topics of the broker: partitions, replicas, records (an upper bound on compacted topics)."""
    from tentalis.kafka.admin import KafkaAdmin

    with reached(bootstrap) as settings:
        admin = KafkaAdmin(settings)
        found = admin.describe(admin.names())
    rows = [
        {
            "topic": topic.name,
            "partitions": len(topic.partitions),
            "replication": min(len(partition.replicas) for partition in topic.partitions),
            "records": sum(partition.end - partition.start for partition in topic.partitions),
            "cleanup": topic.config.get("cleanup.policy", "delete"),
            "managed": topic.managed,
            "holds": ",".join(topic.records),
        }
        for topic in found
    ]
    show(output, ("topic", "partitions", "replication", "records", "cleanup", "managed", "holds"), rows)


@app.command(short_help="Shows one topic: partitions, offsets, settings.")
def describe(name: str, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Shows one topic: partitions with leader, replicas and offsets, and the topic's own settings."""
    from tentalis.kafka.admin import KafkaAdmin

    with reached(bootstrap) as settings:
        found = KafkaAdmin(settings).describe([name])
    if not found:
        raise CommandError(f"the broker has no topic {name}; `tentalis topics list` lists its topics", ExitCode.DRIFT)
    topic = found[0]
    if output is not OutputFormat.TABLE:
        print_data(output, asdict(topic))
        return
    print_table(("topic", "managed", "holds"), [(topic.name, topic.managed, ",".join(topic.records))])
    print_text()
    print_table(
        ("partition", "leader", "replicas", "in-sync", "start", "end"),
        [
            (p.partition, p.leader, ",".join(map(str, p.replicas)), ",".join(map(str, p.in_sync)), p.start, p.end)
            for p in topic.partitions
        ],
    )
    print_text()
    print_table(("setting", "value"), sorted(topic.config.items()))


@app.command("produce-rate", short_help="Shows how many records per second come to each topic.")
def produce_rate(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]...", help="Only these topics. Default: all with records.", show_default=False),
    ] = None,
    over: Annotated[str, typer.Option("--over", help="Time to count over: 30s, 10m, 1h, 1d.")] = "10m",
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Counts the records that were appended within the last minutes, by the broker's timestamps, without waiting.

    On compacted topics, and on topics with transactions, the number is an upper bound."""
    from tentalis.ops.produce_rate import produce_rates
    from tentalis.text.timestamps import now_ms

    now = now_ms()
    since = moment_of("--over", over, now)
    if since >= now:
        raise CommandError(f"--over {over}: give a time in the past, such as 10m", ExitCode.USAGE)
    with reached(bootstrap) as settings:
        found = produce_rates(settings, names or (), since)
    rows = [
        {"topic": name, "records": count, "per_second": round(count / ((now - since) / 1000), 3)}
        for name, count in found.items()
    ]
    show(output, ("topic", "records", "per_second"), rows)


def _planned(settings: Settings) -> TopicPlan:
    from tentalis.kafka.admin import KafkaAdmin, missing_schemas, plan
    from tentalis.kafka.topic_id_log import unrecorded_topics
    from tentalis.kafka.topology import topic_table

    table = topic_table()
    changes = plan(table, KafkaAdmin(settings).current(table.topics))
    return TopicPlan(changes, missing_schemas(settings), unrecorded_topics(settings))


def _show_plan(output: OutputFormat, planned: TopicPlan) -> None:
    from schemas.topics import SCHEMAS, TOPIC_IDS
    from tentalis.kafka.migration import Risk, risk_of

    rows: list[dict[str, Any]] = [
        {
            "change": change.kind.value,
            "topic": change.topic,
            "risk": risk_of(change).value,
            "detail": str(change),
            "partitions": change.partitions,
            "config": {name: {"is": old, "wanted": new} for name, (old, new) in change.config.items()},
        }
        for change in planned.changes
    ]
    rows += [
        {
            "change": "publish",
            "topic": SCHEMAS,
            "risk": Risk.SAFE.value,
            "detail": f"schema {schema.name} {schema.fingerprint.hex()}",
        }
        for schema in planned.schemas
    ]
    if planned.unrecorded:
        detail = f"ids of {len(planned.unrecorded)} topics"
        rows.append({"change": "record", "topic": TOPIC_IDS, "risk": Risk.SAFE.value, "detail": detail})
    if rows or output is not OutputFormat.TABLE:
        show(output, ("change", "topic", "risk", "detail"), rows)
    else:
        print_text("nothing to do: the broker matches schemas/topics.yaml")


@app.command()
def acls(
    roles: Annotated[
        list[str] | None, typer.Option("--role", help="Only this role; repeatable.", show_default=False)
    ] = None,
    principal: Annotated[
        str | None,
        typer.Option("--principal", help="Principal to grant to. Default: User:tentalis-ROLE.", show_default=False),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Create the ACLs on the broker.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lists the minimal ACLs of each role. --apply creates them (needs Alter on the cluster); none is ever removed."""
    from tentalis.kafka.acls import ROLES
    from tentalis.kafka.admin import bindings, grant

    unknown = sorted(set(roles or ()) - set(ROLES))
    if unknown:
        raise CommandError(f"there is no role {', '.join(unknown)}; the roles are {', '.join(ROLES)}", ExitCode.USAGE)
    if principal is not None and not principal.startswith("User:"):
        raise CommandError(f"--principal {principal}: expected User:NAME", ExitCode.USAGE)
    chosen = [ROLES[name] for name in roles or ROLES]
    rows = [
        {
            "role": role.name,
            "principal": whose,
            "operation": each.operation.value,
            "resource": each.resource.value,
            "name": each.name,
            "pattern": "prefixed" if each.prefixed else "literal",
        }
        for role, whose, each in bindings(chosen, principal)
    ]
    show(output, ("role", "principal", "operation", "resource", "name", "pattern"), rows)
    if apply and not dry_run:
        with reached(bootstrap) as settings:
            if not yes:
                ask(f"Create {len(rows)} ACLs on {settings.bootstrap}?")
            count = grant(settings, bindings(chosen, principal))
        typer.echo(f"created: {count} ACLs", err=True)


@app.command()
def plan(bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Shows the changes of `apply`, which never deletes or shrinks. A wrong partition count cannot be repaired."""
    with reached(bootstrap) as settings:
        planned = _planned(settings)
    _show_plan(output, planned)


@app.command(short_help="Shows the plan; exits with 3 on any difference.")
def diff(bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE) -> None:
    """Shows the plan and exits with 3 if there is any difference, with 7 if an application has lost a topic."""
    from tentalis.ops.lost_topics import lost_topics

    with reached(bootstrap) as settings:
        planned = _planned(settings)
        losses = lost_topics(settings)
    _show_plan(output, planned)
    for loss in losses:
        typer.echo(f"lost: {loss}", err=True)
    if losses:
        raise typer.Exit(ExitCode.PERMANENT)
    if planned.count:
        raise typer.Exit(ExitCode.DRIFT)


def _without_risk(changes: list[Change], on_risk: OnRisk) -> list[Change]:
    """Returns the changes to apply. Raises CommandError if some need a person and `on_risk` is stop."""
    from tentalis.kafka.migration import Risk, dangers, of_risk

    risky = of_risk(changes, Risk.PERSON)
    if on_risk is OnRisk.APPLY or not risky:
        return changes
    named = "; ".join(f"{change.topic}: {', '.join(dangers(change))}" for change in risky)
    if on_risk is OnRisk.STOP:
        raise CommandError(
            f"nothing was changed, because some changes may lose records: {named}. Look at `tentalis topics plan`, "
            "then apply them (`tentalis topics apply`), or leave them out (--on-risk skip)",
            ExitCode.NEEDS_OPERATOR,
        )
    typer.echo(f"skipped, because they may lose records: {named}", err=True)
    return [change for change in changes if change not in risky]


@app.command(short_help="Creates missing topics, corrects settings.")
def apply(
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the broker check the plan and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")] = False,
    on_risk: Annotated[
        OnRisk,
        typer.Option(
            "--on-risk",
            help="With changes by which Kafka may remove records or refuse larger ones (a shorter retention, another "
            "cleanup policy): apply them; stop, change nothing and exit with 5; or skip them.",
        ),
    ] = OnRisk.APPLY,
    replication: Replication = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            envvar=variables.ACCEPT_LOSS.name,
            help="Apply although an application has lost a topic. The application itself must accept it too.",
        ),
    ] = False,
    of_stack: Annotated[
        bool, typer.Option("--of-stack", hidden=True, help="Record in TENTALIS_HOME that its stack has the topics.")
    ] = False,
) -> None:
    """Creates missing topics, corrects settings, publishes missing schemas, records the ids of the topics.

    Idempotent; never deletes a topic. Exits with 7, and changes nothing, if a topic was lost: an empty one in its place
    would hide it."""
    from tentalis.kafka import admin
    from tentalis.kafka.topic_id_log import record_lost_broker, record_topics
    from tentalis.local.made_topics import record_made
    from tentalis.ops.lost_topics import lost_broker, lost_topics

    with reached(bootstrap) as settings:
        losses = [] if accept_loss else lost_topics(settings)
        if losses:
            raise CommandError(
                f"nothing was changed, because topics were lost. {'; '.join(losses)}. Restore them, or continue "
                "without them with --accept-loss (docs/operations/lost-topics.md)",
                ExitCode.PERMANENT,
            )
        emptied = lost_broker(settings) if accept_loss else None
        planned = _planned(settings)
        _show_plan(output, planned)
        planned = replace(planned, changes=_without_risk(planned.changes, on_risk))
        changes, schemas = planned.changes, planned.schemas
        if not planned.count:
            if of_stack and not dry_run:
                record_made(settings, None)
            return
        if not dry_run and not yes:
            ask(f"Apply {planned.count} changes to {settings.bootstrap}?")
        admin.apply(admin.KafkaAdmin(settings), changes, dry_run=dry_run, replication=replication)
        if not dry_run:
            admin.publish_schemas(settings, schemas)
            recorded = record_topics(settings, len(planned.unrecorded))
            if emptied is not None:
                record_lost_broker(settings, emptied)
                typer.echo(f"given up, as --accept-loss asks: {emptied}", err=True)
            _report_recorded(recorded, len(planned.unrecorded))
            if of_stack:
                record_made(settings, recorded.warning(len(planned.unrecorded)))
    verb = "checked by the broker, nothing changed" if dry_run else "applied"
    typer.echo(f"{verb}: {len(changes)} topic changes, {len(schemas)} schemas", err=True)


def _report_recorded(recorded: RecordedTopics, existed: int) -> None:
    """Tells of topics whose old ids were given up, and of a record that began with topics that existed before."""
    for lost in recorded.given_up:
        typer.echo(f"given up, as --accept-loss asks: {lost}", err=True)
    if warning := recorded.warning(existed):
        typer.echo(warning, err=True)


@app.command(short_help="Removes the oldest records of a topic.")
def trim(
    name: str,
    before: Annotated[
        str, typer.Option("--before", help="Remove records written before: 2026-01-31T12:00:00Z, or 7d ago.")
    ],
    dry_run: DryRun = False,
    yes: CarryOut = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows what removing the oldest records of a topic would take away; with --yes, removes them.

    Not for compacted topics."""
    _remove(name, moment_of("--before", before), bootstrap, output, carry_out=yes and not dry_run)


@app.command(short_help="Deletes a topic with all its records.")
def delete(
    name: str,
    dry_run: DryRun = False,
    yes: CarryOut = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows what deleting a topic would take away; with --yes, deletes it."""
    _remove(name, None, bootstrap, output, carry_out=yes and not dry_run)


def _remove(name: str, before_ms: int | None, bootstrap: str | None, output: OutputFormat, *, carry_out: bool) -> None:
    from tentalis.kafka.removal import plan_removal, remove
    from tentalis.kafka.topic_id_log import forget_topic

    whole = before_ms is None
    with reached(bootstrap) as settings:
        removal = plan_removal(settings, name, before_ms)
        if output is not OutputFormat.TABLE:
            print_data(output, asdict(removal))
        else:
            what = (
                f"topic {name} with its {removal.records} records" if whole else f"{removal.records} records of {name}"
            )
            print_text(f"to remove: {what}", *(f"  {each}" for each in removal.consequences))
        if not carry_out:
            typer.echo("nothing was changed; --yes removes them", err=True)
            return
        remove(settings, removal, whole=whole)
        if whole:
            forget_topic(settings, name)
    typer.echo(f"removed: {removal.records} records of {name}", err=True)


@app.command(short_help="Moves the keyed topics to more partitions.")
def repartition(
    partitions: Annotated[
        int, typer.Option("--partitions", min=1, max=keyed_partitions.MOST, help="New number of partitions.")
    ],
    dry_run: DryRun = False,
    yes: CarryOut = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows which topics would be moved to another number of partitions; with --yes, moves them.

    All keyed topics, their dead letters and the states of the stream applications move together; no process of the
    stack may run. Killed in between, run it again. Then set TENTALIS_KEYED_PARTITIONS for every process.
    """
    from importlib import import_module

    from streams.runtime.moving import NotMoved
    from streams.runtime.repartition import ApplicationStateMover
    from tentalis.kafka import topology
    from tentalis.ops.repartition.broker import GroupsActive
    from tentalis.ops.repartition.digests import UnreadableHeaders
    from tentalis.ops.repartition.process import CannotRepartition, CopyDiffers, Repartition

    configure_logging("INFO")
    with reached(bootstrap) as settings:
        movers = [
            ApplicationStateMover(settings, each, import_module(f"streams.apps.{each.name}.moved"))
            for each in topology.streams()
        ]
        work = Repartition(settings, movers)
        try:
            unfinished = work.unfinished()
            if unfinished is not None and unfinished.partitions != partitions:
                raise CommandError(
                    f"a move to {unfinished.partitions} partitions is not finished: run this with --partitions "
                    f"{unfinished.partitions} first",
                    ExitCode.USAGE,
                )
            rows = [] if unfinished else [asdict(each) | {"to": partitions} for each in work.plan(partitions)]
            if unfinished is not None:
                typer.echo(f"a move to {partitions} partitions was interrupted; --yes finishes it", err=True)
            if rows or output is not OutputFormat.TABLE:
                show(output, ("topic", "partitions", "to", "records"), rows)
            if not yes or dry_run:
                typer.echo("nothing was changed; --yes moves them", err=True)
                return
            if rows or unfinished:
                work.finish(unfinished or work.copy(partitions))
        except (CannotRepartition, CopyDiffers, GroupsActive, NotMoved, UnreadableHeaders) as error:
            raise CommandError(str(error)) from error
    typer.echo(
        f"all keyed topics have {partitions} partitions: set {variables.KEYED_PARTITIONS.name}={partitions} for every "
        "process and command of the stack",
        err=True,
    )


@app.command(short_help="Waits until the topics of a role exist.")
def wait(
    role: Annotated[
        str | None,
        typer.Option(
            "--role", help="Role of the ACLs. Default: waits only until a broker answers.", show_default=False
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait.")] = 600.0,
    bootstrap: Bootstrap = None,
) -> None:
    """Waits until the broker answers and has every topic that a role names.

    For containers that start beside the broker, or beside the process that makes the topics. Exits with 4 if no broker
    answered in time, with 3 if topics are missing.
    """
    from tentalis.kafka.acls import ROLES
    from tentalis.kafka.preflight import wait_for_topics

    if role is not None and role not in ROLES:
        raise CommandError(f"there is no role {role}; the roles are {', '.join(ROLES)}", ExitCode.USAGE)
    configure_logging("INFO")
    wait_for_topics(resolve_settings(bootstrap), () if role is None else ROLES[role].topics, timeout)
