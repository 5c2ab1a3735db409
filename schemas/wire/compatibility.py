"""Checks BACKWARD_TRANSITIVE compatibility: every schema reads the records of all its earlier versions, because logs
are read for years.

Earlier versions are kept below `versions/N/`; a registry keeps those of its subjects itself.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.wire.avro import HERE, AvroSchema


@dataclass(frozen=True, slots=True)
class IncompatibleSchema:
    """An earlier version that the current schema of a record cannot read. `writer`: the source of that version."""

    record: str
    writer: str
    problem: str

    def __str__(self) -> str:
        return f"{self.record} cannot read {self.writer}: {self.problem}"


def problem(reader: str, writer: str) -> str:
    """The reason why a reader's schema (JSON text) cannot read a writer's records; empty if it can."""
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
    from avro.errors import IgnoredLogicalType
    from avro.schema import parse

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredLogicalType)  # our own logical types: int32-le and so on
        checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
        found = checker.get_compatibility(parse(reader), parse(writer))
    if found.compatibility is SchemaCompatibilityType.compatible:
        return ""
    return "; ".join(f"{message} (at {place})" for message, place in zip(found.messages, found.locations, strict=False))


def shipped(folder: Path = HERE) -> dict[str, AvroSchema]:
    """The schemas of a folder by record name. Raises ValueError, which names a file that is not a schema."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.avsc"))}


def kept(folder: Path = HERE) -> dict[str, dict[int, AvroSchema]]:
    """The kept versions of each record below `folder`, oldest first. Raises ValueError as `shipped`."""
    found: dict[str, dict[int, AvroSchema]] = {}
    for path in sorted((folder / "versions").glob("*/*.avsc"), key=lambda path: (int(path.parent.name), path.stem)):
        found.setdefault(path.stem, {})[int(path.parent.name)] = _read(path)
    return found


def check(
    current: Mapping[str, AvroSchema], earlier: Mapping[str, Mapping[int, AvroSchema]], source: str
) -> Iterator[IncompatibleSchema]:
    """Yields every earlier version that the current schemas cannot read; `source` names the origin of the versions."""
    for name, versions in sorted(earlier.items()):
        for number, writer in versions.items():
            if name not in current:
                yield IncompatibleSchema(
                    name, f"{source} {number}", f"{name}.avsc is gone; its records are still on the log"
                )
            elif found := problem(current[name].text, writer.text):
                yield IncompatibleSchema(name, f"{source} {number}", found)


def _read(path: Path) -> AvroSchema:
    try:
        schema = AvroSchema.parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if schema.name != path.stem:
        raise ValueError(f"{path}: contains a schema of {schema.name}")
    return schema
