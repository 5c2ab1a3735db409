"""`tentalis schemas`: the Avro schemas of this version, their earlier versions, and a schema registry."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import variable_option
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text, show
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from schemas.wire.avro import AvroSchema
    from schemas.wire.registry import ConfluentRegistry

app = typer.Typer(
    help="Avro schemas of this version, compared with their kept versions and a schema registry.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Registry = Annotated[
    str | None,
    variable_option(variables.REGISTRY_URL, "--registry", text="URL of a Confluent-compatible schema registry."),
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
    from schemas.wire.avro import HERE

    return folder or HERE


def _registry(url: str | None) -> ConfluentRegistry:
    if not url:
        raise CommandError(
            "no schema registry is set: give --registry or SCHEMA_REGISTRY_URL. Without a registry, "
            "`tentalis topics apply` publishes the schemas on tentalis.schemas.v1",
            ExitCode.USAGE,
        )
    from schemas.wire.registry import ConfluentRegistry

    return ConfluentRegistry(url)


def _number(schema: AvroSchema, versions: dict[int, AvroSchema]) -> int | None:
    """Returns the version number that a schema already has, or None."""
    return next((n for n, version in versions.items() if version.fingerprint == schema.fingerprint), None)


@app.command("list", short_help="Lists every record and its fingerprint.")
def list_schemas(folder: Folder = None, url: Registry = None, output: Format = OutputFormat.TABLE) -> None:
    """Lists every record: fingerprint, kept version (none if it changed since), topics, and version in the registry if
    one is given."""
    from schemas.topics import table
    from schemas.wire.compatibility import kept, shipped

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
    version: Annotated[int | None, typer.Option("--version", help="Kept version. Default: the current schema.")] = None,
    folder: Folder = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Prints a schema: its own text, one line of JSON, or YAML."""
    text = _one(name, version, _folder(folder)).text
    if output is OutputFormat.TABLE:
        print_text(text)
    else:
        print_data(output, json.loads(text))


def _one(name: str, version: int | None, folder: Path) -> AvroSchema:
    from schemas.wire.compatibility import kept, shipped

    if version is None:
        there = shipped(folder)
        if name not in there:
            raise CommandError(f"there is no record {name}; `tentalis schemas list` lists the records")
        return there[name]
    versions = kept(folder).get(name, {})
    if version not in versions:
        have = ", ".join(map(str, versions)) or "none"
        raise CommandError(f"version {version} of {name} is not kept; kept versions: {have}")
    return versions[version]


@app.command(short_help="Prints the CRC-64-AVRO fingerprint in hex.")
def fingerprint(
    of: Annotated[str, typer.Argument(help="Name of a record, or a schema file; - is standard input.")],
    folder: Folder = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Prints the CRC-64-AVRO fingerprint in hex: the header of encoded records and the key on tentalis.schemas.v1."""
    from schemas.wire.avro import AvroSchema

    if of == "-" or Path(of).is_file():
        text = sys.stdin.read() if of == "-" else Path(of).read_text(encoding="utf-8")
        schema = AvroSchema.parse(text)
    else:
        schema = _one(of, None, _folder(folder))
    if output is OutputFormat.TABLE:
        print_text(schema.fingerprint.hex())
    else:
        print_data(output, {"name": schema.name, "fingerprint": schema.fingerprint.hex()})


@app.command(short_help="Checks that earlier versions can be read.")
def check(folder: Folder = None, url: Registry = None, output: Format = OutputFormat.TABLE) -> None:
    """Checks that every schema reads records of all its kept versions (BACKWARD_TRANSITIVE), and of all versions in the
    registry if one is given. Exits with 3 if not."""
    from schemas.wire.compatibility import check as compared
    from schemas.wire.compatibility import kept, shipped

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
    if output is not OutputFormat.TABLE:
        print_data(output, {"records": len(current), "compared": count, "incompatible": rows, "not_kept": new})
    elif rows:
        columns = ("record", "cannot_read", "problem")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    for name in new:
        typer.echo(f"{name}.avsc has changed: before a release, copy it to versions/N/{name}.avsc", err=True)
    typer.echo(f"{len(current)} records, {count} earlier versions, {len(rows)} of them unreadable", err=True)
    if rows:
        raise typer.Exit(ExitCode.DRIFT)


@app.command()
def register(
    url: Registry = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be registered and register nothing.")
    ] = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Registers every schema under its record's name. Safe to repeat.

    Exits with 3 if the registry refuses a schema because it cannot read records of an earlier version."""
    from schemas.wire.avro import all_current
    from schemas.wire.compatibility import check as compared
    from schemas.wire.registry import SUBJECT_PREFIX

    registry = _registry(url)
    current = {schema.name: schema for schema in all_current()}
    versions = {name: registry.versions(name) for name in current}
    found = list(compared(current, versions, "registry version"))
    if found:
        raise CommandError("nothing was registered: " + "; ".join(map(str, found)), ExitCode.DRIFT)
    rows: list[dict[str, Any]] = []
    for name, schema in current.items():
        there = _number(schema, versions[name]) is not None
        change = "there" if there else "new version" if versions[name] else "new subject"
        row = {"subject": SUBJECT_PREFIX + name, "change": change, "fingerprint": schema.fingerprint.hex()}
        rows.append(row | ({} if dry_run else {"id": registry.register(schema)}))
    show(output, ("subject", "change", *(() if dry_run else ("id",)), "fingerprint"), rows)
