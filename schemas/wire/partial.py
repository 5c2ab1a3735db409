"""Reads as much as possible of an Avro body, to show a record that could not be decoded."""

import math
import struct
from typing import Any

from schemas.wire.avro import AvroSchema

MOST_SHOWN = 1000
"""Limit of items in all arrays and maps that are read for display."""


class UnreadableBody(Exception):
    """The body cannot be read further. The message gives the position and the reason."""


class TooManyItems(UnreadableBody):
    """The arrays and maps hold more items than the limit."""


def read_partial(schema: AvroSchema, body: bytes) -> tuple[dict[str, Any], str]:
    """Returns the fields up to the first unreadable one, and the reason why reading ended there ("" if it did not).

    A length that exceeds the body is never trusted: time and memory stay within the size of the body.
    """
    reader = _BodyReader(schema.parsed, body)
    found: dict[str, Any] = {}
    try:
        reader.record(schema.parsed, found, "")
    except UnreadableBody as error:
        return found, str(error)
    left = len(body) - reader.at
    return found, f"{left} bytes are left over after the record, from byte {reader.at} on" if left else ""


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def check_items(schema: AvroSchema, body: bytes, most: int) -> None:
    """Raises TooManyItems if the arrays and maps of a body hold more than `most` items in all.

    An item of two bytes becomes a kilobyte of objects, so a record within its size limit could fill the memory of a
    process that decodes it. A body that is not valid Avro is left to the decoder.
    """
    reader = _BodyReader(schema.parsed, body, most, counting=True)
    try:
        reader.record(schema.parsed, {}, "")
    except TooManyItems:
        raise
    except UnreadableBody:
        return


class _BodyReader:
    def __init__(self, parsed: Any, body: bytes, most: int = MOST_SHOWN, *, counting: bool = False) -> None:
        self.at = 0
        self._counting = counting
        self._most = most
        self._body = body
        self._items = 0
        self._named: dict[str, Any] = {}
        self._name(parsed)

    def _name(self, schema: Any) -> None:
        if isinstance(schema, list):
            for branch in schema:
                self._name(branch)
        elif isinstance(schema, dict):
            if "name" in schema and "type" in schema and schema["type"] in ("record", "enum", "fixed"):
                self._named[schema["name"]] = schema
            for part in (schema.get("items"), schema.get("values")):
                self._name(part)
            for field in schema.get("fields", ()):
                self._name(field["type"])

    def record(self, schema: Any, found: dict[str, Any], path: str) -> None:
        for field in schema["fields"]:
            where = f"{path}.{field['name']}" if path else str(field["name"])
            if self._resolved(field["type"])[0] == "record":
                # Stored before it is read, so that a partly read record is shown too.
                nested: dict[str, Any] = {}
                found[field["name"]] = nested
                self.record(self._resolved(field["type"])[1], nested, where)
            else:
                found[field["name"]] = self._value(field["type"], where)

    def _resolved(self, schema: Any) -> tuple[str, Any]:
        while True:
            if isinstance(schema, list):
                return "union", schema
            if isinstance(schema, str):
                if schema not in self._named:
                    return schema, schema
                schema = self._named[schema]
            elif isinstance(schema["type"], str) and schema["type"] in ("record", "enum", "array", "map", "fixed"):
                return schema["type"], schema
            else:
                schema = schema["type"]

    def _value(self, schema: Any, path: str) -> Any:
        kind, schema = self._resolved(schema)
        match kind:
            case "null":
                return None
            case "boolean":
                return self._take(1, path) != b"\0"
            case "int" | "long":
                return self._long(path)
            case "float":
                return _number(struct.unpack("<f", self._take(4, path))[0])
            case "double":
                return _number(struct.unpack("<d", self._take(8, path))[0])
            case "bytes":
                return self._take(self._long(path), path)
            case "string":
                return self._take(self._long(path), path).decode("utf-8", "replace")
            case "fixed":
                return self._take(schema["size"], path)
            case "enum":
                return self._one_of(schema["symbols"], path)
            case "union":
                return self._value(self._one_of(schema, path), path)
            case "record":
                nested: dict[str, Any] = {}
                self.record(schema, nested, path)
                return nested
            case _:
                return self._blocks(kind, schema, path)

    def _blocks(self, kind: str, schema: Any, path: str) -> Any:
        pairs: list[tuple[str, Any]] = []
        while count := self._long(path):
            if count < 0:
                count = -count
                self._long(path)
            # When only counting, a block past the limit need not be read.
            if self._counting and self._items + count > self._most:
                raise self._too_many(path)
            for _ in range(count):
                self._items += 1
                if self._items > self._most:
                    raise self._too_many(path)
                where = f"{path}[{len(pairs)}]"
                key = self._take(self._long(where), where).decode("utf-8", "replace") if kind == "map" else ""
                pairs.append((key, self._value(schema["values" if kind == "map" else "items"], where)))
        return dict(pairs) if kind == "map" else [value for _, value in pairs]

    def _one_of(self, choices: Any, path: str) -> Any:
        index = self._long(path)
        if not 0 <= index < len(choices):
            raise self._unreadable(path, f"choice {index} of {len(choices)}")
        return choices[index]

    def _take(self, size: int, path: str) -> bytes:
        left = len(self._body) - self.at
        if not 0 <= size <= left:
            raise self._unreadable(path, f"{size:,} bytes where {left:,} are left")
        self.at += size
        return self._body[self.at - size : self.at]

    def _long(self, path: str) -> int:
        value = shift = 0
        while True:
            byte = self._take(1, path)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
            shift += 7
            if shift > 63:
                raise self._unreadable(path, "a number of more than 64 bits")

    def _too_many(self, path: str) -> TooManyItems:
        return TooManyItems(f"{path}, byte {self.at}: more than {self._most:,} items")

    def _unreadable(self, path: str, why: str) -> UnreadableBody:
        return UnreadableBody(f"{path}, byte {self.at}: {why}")
