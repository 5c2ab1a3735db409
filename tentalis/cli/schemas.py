"""`tentalis schemas`: the Avro schemas of this version, their kept versions, and a schema registry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.common import DRIFT, USAGE, CommandError, Format, Output, print_json, print_table, show

if TYPE_CHECKING:
    from schemas.avro import AvroSchema
    from schemas.registry import ConfluentRegistry

app = typer.Typer(
    help="The Avro schemas of this version, held against their kept versions and a schema registry.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Registry = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="SCHEMA_REGISTRY_URL",
        help="URL of a Confluent-compatible schema registry.",
        show_envvar=True,
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        exists=True,
        file_okay=False,
        help="Folder with NAME.avsc and versions/N/NAME.avsc. Default: the schemas of this installation.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(help="Name of a record, such as Task.")]


def _folder(folder: Path | None) -> Path:
    from schemas.avro import HERE

    return folder or HERE


def _registry(url: str | None) -> ConfluentRegistry:
    if not url:
        raise CommandError(
            "no schema registry is known: name one with --registry or SCHEMA_REGISTRY_URL. Without one nothing needs "
            "registering: `tentalis topics apply` puts the schemas on tentalis.schemas.v1",
            USAGE,
        )
    from schemas.registry import ConfluentRegistry

    return ConfluentRegistry(url)


def _number(schema: AvroSchema, versions: dict[int, AvroSchema]) -> int | None:
    """Under which version a schema is there already."""
    return next((n for n, version in versions.items() if version.fingerprint == schema.fingerprint), None)


@app.command("list", short_help="Every record and its fingerprint.")
def list_schemas(folder: Folder = None, url: Registry = None, output: Format = Output.TABLE) -> None:
    """Every record: fingerprint, kept version (none: changed since), topics, and version in the registry if one is
    named."""
    from schemas.compatibility import kept, shipped
    from schemas.topics import table

    where = _folder(folder)
    versions, registry = kept(where), _registry(url) if url else None
    rows: list[dict[str, Any]] = []
    for name, schema in shipped(where).items():
        row = {
            "record": name,
            "fingerprint": schema.fingerprint.hex(),
            "kept": _number(schema, versions.get(name, {})),
            "topics": ",".join(topic.name for topic in table().topics.values() if name in topic.records),
        }
        if registry is not None:
            row["registry"] = _number(schema, registry.versions(name))
        rows.append(row)
    show(output, ("record", "fingerprint", "kept", *(("registry",) if registry else ()), "topics"), rows)


@app.command("show")
def show_schema(
    name: Name,
    version: Annotated[int | None, typer.Option("--version", help="A kept version. Default: the current one.")] = None,
    folder: Folder = None,
) -> None:
    """The text of a schema, JSON."""
    sys.stdout.write(_one(name, version, _folder(folder)).text + "\n")


def _one(name: str, version: int | None, folder: Path) -> AvroSchema:
    from schemas.compatibility import kept, shipped

    if version is None:
        there = shipped(folder)
        if name not in there:
            raise CommandError(f"there is no record {name}; `tentalis schemas list` shows those there are")
        return there[name]
    versions = kept(folder).get(name, {})
    if version not in versions:
        have = ", ".join(map(str, versions)) or "none"
        raise CommandError(f"version {version} of {name} is not kept; kept versions: {have}")
    return versions[version]


@app.command(short_help="The CRC-64-AVRO fingerprint in hex.")
def fingerprint(
    of: Annotated[str, typer.Argument(help="Name of a record, or a file with a schema; - is standard input.")],
    folder: Folder = None,
) -> None:
    """The CRC-64-AVRO fingerprint in hex, as it stands in a record's first bytes and as key on tentalis.schemas.v1."""
    from schemas.avro import AvroSchema

    if of == "-" or Path(of).is_file():
        text = sys.stdin.read() if of == "-" else Path(of).read_text(encoding="utf-8")
        schema = AvroSchema.parse(text)
    else:
        schema = _one(of, None, _folder(folder))
    sys.stdout.write(schema.fingerprint.hex() + "\n")


@app.command(short_help="Whether every kept version is still readable.")
def check(folder: Folder = None, url: Registry = None, output: Format = Output.TABLE) -> None:
    """Whether every schema reads what every kept version of it wrote (BACKWARD_TRANSITIVE), and what every version in
    the registry wrote if one is named. Exits with 3 if not."""
    from schemas.compatibility import check as compared
    from schemas.compatibility import kept, shipped

    where = _folder(folder)
    current, versions = shipped(where), kept(where)
    found = list(compared(current, versions, "kept version"))
    count = sum(map(len, versions.values()))
    if url:
        registry = _registry(url)
        registered = {name: registry.versions(name) for name in current}
        found += compared(current, registered, "registry version")
        count += sum(map(len, registered.values()))
    new = [name for name, schema in current.items() if _number(schema, versions.get(name, {})) is None]
    rows = [{"record": one.record, "cannot_read": one.writer, "problem": one.problem} for one in found]
    if output is Output.JSON:
        print_json({"records": len(current), "compared": count, "incompatible": rows, "not_kept": new})
    elif rows:
        columns = ("record", "cannot_read", "problem")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    for name in new:
        typer.echo(
            f"{name}.avsc has changed; before a release, keep it below versions/ in a folder of its own", err=True
        )
    typer.echo(f"{len(current)} records, {count} earlier versions, {len(rows)} of them unreadable", err=True)
    if rows:
        raise typer.Exit(DRIFT)


@app.command()
def register(
    url: Registry = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be registered, and register nothing.")
    ] = False,
    output: Format = Output.TABLE,
) -> None:
    """Registers every schema of this version under its record's name. Again is harmless. Exits with 3 if the registry
    refuses one, because it could not read what an earlier version wrote."""
    from schemas.avro import all_current
    from schemas.compatibility import check as compared
    from schemas.registry import SUBJECT_PREFIX

    registry = _registry(url)
    current = {schema.name: schema for schema in all_current()}
    versions = {name: registry.versions(name) for name in current}
    found = list(compared(current, versions, "registry version"))
    if found:
        raise CommandError("nothing was registered: " + "; ".join(map(str, found)), DRIFT)
    rows: list[dict[str, Any]] = []
    for name, schema in current.items():
        there = _number(schema, versions[name]) is not None
        change = "there" if there else "new version" if versions[name] else "new subject"
        row = {"subject": SUBJECT_PREFIX + name, "change": change, "fingerprint": schema.fingerprint.hex()}
        rows.append(row | ({} if dry_run else {"id": registry.register(schema)}))
    show(output, ("subject", "change", *(() if dry_run else ("id",)), "fingerprint"), rows)
