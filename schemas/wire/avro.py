"""The .avsc files of this folder, parsed, with their fingerprints."""

import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

HERE = Path(__file__).parents[1]


def _without_logical_types(schema: Any) -> Any:
    """Removes logical types: timestamps stay integers (fastavro would make datetimes of them), tensors stay bytes."""
    if isinstance(schema, dict):
        return {key: _without_logical_types(value) for key, value in schema.items() if key != "logicalType"}
    return [_without_logical_types(item) for item in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """One schema: its record name, its text, the 8 bytes of its CRC-64-AVRO fingerprint, and fastavro's parsed form."""

    name: str
    text: str
    fingerprint: bytes
    parsed: Any

    @classmethod
    def parse(cls, text: str) -> "AvroSchema":
        """Parses a schema. Raises ValueError if the text is not a named Avro record schema."""
        try:
            raw = json.loads(text)
            canonical = to_parsing_canonical_form(raw)
            parsed = fastavro.parse_schema(_without_logical_types(raw))
            name = str(raw["name"]).rpartition(".")[2]
        except (json.JSONDecodeError, fastavro.schema.SchemaParseException, KeyError, TypeError) as error:
            raise ValueError(f"not an Avro record schema: {error!r}") from error
        return cls(name, text.strip(), bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO")), parsed)


@cache
def current(name: str) -> AvroSchema:
    """The schema that this version of the code writes for a record. Raises KeyError for an unknown record name."""
    path = HERE / f"{name}.avsc"
    if not path.is_file():
        raise KeyError(f"no schema {name}.avsc")
    return AvroSchema.parse(path.read_text(encoding="utf-8"))


@cache
def all_current() -> tuple[AvroSchema, ...]:
    """Every schema that this version of the code writes, in name order."""
    return tuple(current(path.stem) for path in sorted(HERE.glob("*.avsc")))


def write(schema: AvroSchema, datum: dict[str, Any]) -> bytes:
    """The Avro body of a datum."""
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema.parsed, datum)
    return buffer.getvalue()


def read(writer: AvroSchema, reader: AvroSchema, body: bytes) -> dict[str, Any]:
    """Decodes a body, resolving the writer's schema to the reader's.

    Raises ValueError if bytes are missing or left over; fastavro's own errors pass through.
    """
    buffer = io.BytesIO(body)
    resolved = None if writer.fingerprint == reader.fingerprint else reader.parsed
    datum = fastavro.schemaless_reader(buffer, writer.parsed, resolved)
    left = len(body) - buffer.tell()
    if left:
        raise ValueError(f"{left} bytes are left over after the record")
    assert isinstance(datum, dict)
    return datum
