"""`tentalis topics`: the topics on the broker held against schemas/topics.yaml."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.common import (
    DRIFT,
    USAGE,
    Bootstrap,
    CommandError,
    Format,
    Output,
    print_json,
    print_table,
    reached,
    show,
)

if TYPE_CHECKING:
    from schemas.avro import AvroSchema
    from tentalis.admin import Change
    from tentalis.config import Settings

app = typer.Typer(
    help="Topics on the broker, held against the table that this version ships.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Replication = Annotated[
    int | None,
    typer.Option(
        "--replication-factor",
        min=1,
        envvar="TENTALIS_REPLICATION_FACTOR",
        help="Of topics that are created. Default: 3, or the number of brokers where there are fewer.",
        show_default=False,
    ),
]


@app.command("list", short_help="Every topic of the broker.")
def list_topics(bootstrap: Bootstrap = None, output: Format = Output.TABLE) -> None:
    """Every topic of the broker: partitions, replicas, records (an upper bound on compacted topics)."""
    from tentalis.admin import KafkaAdmin

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


@app.command(short_help="One topic: partitions, offsets, settings.")
def describe(name: str, bootstrap: Bootstrap = None, output: Format = Output.TABLE) -> None:
    """One topic: its partitions with leader, replicas and offsets, and the settings made for it."""
    from tentalis.admin import KafkaAdmin

    with reached(bootstrap) as settings:
        found = KafkaAdmin(settings).describe([name])
    if not found:
        raise CommandError(f"the broker has no topic {name}; `tentalis topics list` shows those it has")
    topic = found[0]
    if output is Output.JSON:
        print_json(asdict(topic))
        return
    print_table(("topic", "managed", "holds"), [(topic.name, topic.managed, ",".join(topic.records))])
    print()
    print_table(
        ("partition", "leader", "replicas", "in-sync", "start", "end"),
        [
            (p.partition, p.leader, ",".join(map(str, p.replicas)), ",".join(map(str, p.in_sync)), p.start, p.end)
            for p in topic.partitions
        ],
    )
    print()
    print_table(("setting", "value"), sorted(topic.config.items()))


def _planned(settings: Settings) -> tuple[list[Change], list[AvroSchema]]:
    from schemas.topics import table
    from tentalis.admin import KafkaAdmin, missing_schemas, plan

    return plan(table(), KafkaAdmin(settings).current(table().topics)), missing_schemas(settings)


def _show_plan(output: Output, changes: list[Change], schemas: list[AvroSchema]) -> None:
    from schemas.topics import SCHEMAS

    rows: list[dict[str, Any]] = [
        {
            "change": change.kind.value,
            "topic": change.topic,
            "detail": str(change),
            "partitions": change.partitions,
            "config": {name: {"is": old, "wanted": new} for name, (old, new) in change.config.items()},
        }
        for change in changes
    ]
    rows += [
        {"change": "publish", "topic": SCHEMAS, "detail": f"schema {schema.name} {schema.fingerprint.hex()}"}
        for schema in schemas
    ]
    if rows or output is Output.JSON:
        show(output, ("change", "topic", "detail"), rows)
    else:
        print("nothing to do: the broker is as schemas/topics.yaml says")


@app.command()
def acls(
    roles: Annotated[
        list[str] | None, typer.Option("--role", help="Of this role only; again for more.", show_default=False)
    ] = None,
    principal: Annotated[
        str | None,
        typer.Option("--principal", help="Whom to grant to. Default: User:tentalis-ROLE.", show_default=False),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Create them on the broker.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
) -> None:
    """The least ACLs of each role. With --apply they are created (needs Alter on the cluster); none is ever removed."""
    from tentalis.acls import ROLES
    from tentalis.admin import bindings, grant

    unknown = sorted(set(roles or ()) - set(ROLES))
    if unknown:
        raise CommandError(f"there is no role {', '.join(unknown)}; there are {', '.join(ROLES)}", USAGE)
    if principal is not None and not principal.startswith("User:"):
        raise CommandError(f"--principal {principal}: Kafka's principals are written User:NAME", USAGE)
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
    if apply:
        with reached(bootstrap) as settings:
            if not yes:
                typer.confirm(f"Create {len(rows)} ACLs on {settings.bootstrap}?", abort=True, err=True)
            count = grant(settings, bindings(chosen, principal))
        typer.echo(f"created: {count} ACLs", err=True)


@app.command()
def plan(bootstrap: Bootstrap = None, output: Format = Output.TABLE) -> None:
    """What `apply` would do. Never deletes, never shrinks; a different partition count is impossible to repair."""
    with reached(bootstrap) as settings:
        changes, schemas = _planned(settings)
    _show_plan(output, changes, schemas)


@app.command()
def diff(bootstrap: Bootstrap = None, output: Format = Output.TABLE) -> None:
    """As `plan`, and exits with 3 if there is any difference."""
    with reached(bootstrap) as settings:
        changes, schemas = _planned(settings)
    _show_plan(output, changes, schemas)
    if changes or schemas:
        raise typer.Exit(DRIFT)


@app.command(short_help="Creates what is missing, sets what differs.")
def apply(
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the broker check the plan and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    replication: Replication = None,
) -> None:
    """Creates missing topics, sets differing settings, publishes missing schemas. Applying twice changes nothing."""
    from tentalis import admin

    with reached(bootstrap) as settings:
        changes, schemas = _planned(settings)
        _show_plan(output, changes, schemas)
        if not changes and not schemas:
            return
        count = len(changes) + len(schemas)
        if not dry_run and not yes:
            typer.confirm(f"Apply {count} changes to {settings.bootstrap}?", abort=True, err=True)
        admin.apply(admin.KafkaAdmin(settings), changes, dry_run=dry_run, replication=replication)
        if not dry_run:
            admin.publish_schemas(settings, schemas)
    verb = "checked by the broker, nothing changed" if dry_run else "applied"
    typer.echo(f"{verb}: {len(changes)} topic changes, {len(schemas)} schemas", err=True)
