"""Encodes records to bytes and decodes them.

There are two wire formats, and readers accept both: Confluent framing (a zero byte, the registry's schema id in 4
bytes, big-endian) if a registry is configured, else Avro single-object encoding (C3 01, the writer schema's CRC-64-AVRO
fingerprint in 8 bytes). With the second the writer's schema is on `tentalis.schemas.v1`, so that the log stays readable
for years.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from schemas.place import RecordPlace
from schemas.problems import problems
from schemas.records import RECORDS, Record
from schemas.wire import avro
from schemas.wire.avro import AvroSchema
from schemas.wire.compiled import MOST_ITEMS, Encoder, Unsure, compiled
from schemas.wire.partial import check_items, read_partial

log = logging.getLogger(__name__)

T = TypeVar("T")

SINGLE_OBJECT = b"\xc3\x01"
CONFLUENT = b"\x00"
SMALL_BYTES = 2**16
"""A body up to this size cannot hold so many items that they need counting before it is decoded."""
REASON_CHARS = 1000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0


class DecodeError(Exception):
    """Bytes that are not a record of this topic. `stage` is `decode` (framing, schema, Avro) or `validate` (values)."""

    def __init__(self, reason: str, *, topic: str, partition: int, offset: int, schema: str, stage: str) -> None:
        # The reason goes into logs and headers, and may quote the record's content.
        reason = reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]}..."
        super().__init__(f"{RecordPlace(topic, partition, offset)}: {reason} (schema: {schema}, stage: {stage})")
        self.reason, self.topic, self.partition, self.offset = reason, topic, partition, offset
        self.schema, self.stage = schema, stage


class SchemasUnavailable(Exception):
    """A schema cannot be looked up now (the registry or the broker is unreachable, or not prepared). The record is not
    known to be bad: it must be neither dead-lettered nor skipped."""


class Registry(Protocol):
    """The part of a schema registry that the codec needs."""

    def id_of(self, schema: AvroSchema) -> int:
        """The registry's id of a schema. Raises SchemasUnavailable if the registry is unreachable or lacks it."""
        ...

    def schema_by_id(self, schema_id: int) -> AvroSchema:
        """The schema of an id. Raises LookupError if the registry reports that it does not have the id, and
        SchemasUnavailable if it is unreachable."""
        ...


class Codec:
    """Encodes and decodes records; one per process.

    `lookup` finds a writer's schema that this code does not ship, by fingerprint: normally on `tentalis.schemas.v1`.
    `patience`: seconds for which requests to registry and lookup are retried (blocking, with back-off) while they are
    unreachable, before SchemasUnavailable is raised.
    """

    def __init__(
        self,
        registry: Registry | None = None,
        lookup: Callable[[bytes], AvroSchema | None] = lambda _: None,
        patience: float = 0.0,
    ) -> None:
        self._registry = registry
        self._lookup = lookup
        self._patience = patience
        self.decode_seconds = 0.0
        """Total decoding time, updated by callers that measure it."""
        self._known = {schema.fingerprint: schema for schema in avro.all_current()}
        self._encoders: dict[str, tuple[Encoder, bytes]] = {}
        self._framings: dict[bytes, bytes] = {}

    def ready(self, name: str) -> bool:
        """True if a record of this name can be encoded without a request to the registry."""
        return self._registry is None or name in self._encoders

    def prepare(self, name: str) -> None:
        """Looks up what `encode` needs for records of this name. Blocking. Raises SchemasUnavailable."""
        if name not in self._encoders:
            self._encoders[name] = compiled(name).encode, self._framing(avro.current(name))

    def encode(self, topic: str, record: Record) -> bytes:
        """Encodes a record for a topic. Raises SchemasUnavailable."""
        name = type(record).__name__
        if name not in self._encoders:
            self.prepare(name)
        encode, framing = self._encoders[name]
        return encode(record, framing)

    def encode_single(self, record: Record) -> bytes:
        """Encodes a record in single-object encoding, which needs no request to a registry; see `reframed`."""
        name = type(record).__name__
        return compiled(name).encode(record, SINGLE_OBJECT + avro.current(name).fingerprint)

    def reframed(self, value: bytes) -> bytes:
        """Converts bytes from `encode_single` to the framing of this codec; leaves other bytes unchanged. Blocking.

        Raises SchemasUnavailable, and LookupError for bytes of an unknown schema.
        """
        if self._registry is None or value[:2] != SINGLE_OBJECT:
            return value
        schema = self._by_fingerprint(value[2:10])
        if schema is None:
            raise LookupError(f"unknown schema {value[2:10].hex()}: neither shipped nor on tentalis.schemas.v1")
        return self._framing(schema) + value[10:]

    def _framing(self, schema: AvroSchema) -> bytes:
        """The prefix of the bodies that are written with a schema."""
        registry = self._registry
        if registry is None:
            return SINGLE_OBJECT + schema.fingerprint
        if schema.fingerprint not in self._framings:
            schema_id = self._asked(lambda: registry.id_of(schema))
            self._framings[schema.fingerprint] = CONFLUENT + schema_id.to_bytes(4, "big")
        return self._framings[schema.fingerprint]

    def decode(
        self, value: bytes | None, *, topic: str, partition: int, offset: int, expected: Collection[str] | None = None
    ) -> Record:
        """Decodes a record; `expected` are the record names that the topic may hold.

        Raises DecodeError, with topic, partition, offset and schema, for anything that is not such a record, and
        SchemasUnavailable if the schema cannot be looked up now.
        """

        def error(reason: str, schema: str, stage: str = "decode") -> DecodeError:
            return DecodeError(reason, topic=topic, partition=partition, offset=offset, schema=schema, stage=stage)

        if value is None:
            raise error("a tombstone where a record was expected", "none")
        if value[:2] == SINGLE_OBJECT:
            writer, body = self._by_fingerprint(value[2:10]), value[10:]
            if writer is None:
                raise error("unknown schema: neither shipped nor on tentalis.schemas.v1", value[2:10].hex() or "none")
        elif value[:1] == CONFLUENT and len(value) >= 5:
            registry, schema_id = self._registry, int.from_bytes(value[1:5], "big")
            if registry is None:
                raise error(
                    "begins with a zero byte: either not a record, or one in Confluent framing, "
                    "for which SCHEMA_REGISTRY_URL must be set",
                    f"id {schema_id}",
                )
            try:
                writer, body = self._asked(lambda: registry.schema_by_id(schema_id)), value[5:]
            except LookupError as cause:
                raise error(
                    f"begins with a zero byte, but as Confluent framing its schema is unknown to the registry: {cause}",
                    f"id {schema_id}",
                ) from cause
        else:
            raise error(f"bad magic {value[:2].hex() or '(no bytes)'}: neither C301 nor Confluent framing", "none")
        if writer.name not in RECORDS or (expected is not None and writer.name not in expected):
            wanted = ", ".join(sorted(expected)) if expected is not None else "a known record"
            raise error(f"holds a {writer.name} where {wanted} is expected", writer.name)
        reader = avro.current(writer.name)
        if writer.fingerprint == reader.fingerprint:
            try:
                return compiled(writer.name).decode(body)
            except Unsure:
                pass  # the slow path below reports the error, if there is one
        try:
            if len(body) > SMALL_BYTES:
                check_items(writer, body, MOST_ITEMS)
            datum = avro.read(writer, reader, body)
        except Exception as cause:
            raise error(f"not readable as Avro: {type(cause).__name__}: {cause}", writer.name) from cause
        try:
            return RECORDS[writer.name].model_validate(datum)
        except ValidationError as cause:
            raise error(problems(cause, "record"), writer.name, "validate") from cause

    def partial(self, value: bytes) -> tuple[str, dict[str, Any], str] | None:
        """Reads as much as possible of bytes that are not a valid record: the writer's record name, the fields up to
        the first unreadable one, and the reason why reading ended. None if the framing names no known schema.
        """
        body = value[10:] if value[:2] == SINGLE_OBJECT else value[5:]
        writer = self._by_fingerprint(value[2:10]) if value[:2] == SINGLE_OBJECT else None
        if value[:1] == CONFLUENT and len(value) >= 5 and self._registry is not None:
            try:
                writer = self._registry.schema_by_id(int.from_bytes(value[1:5], "big"))
            except LookupError:
                return None
        return None if writer is None else (writer.name, *read_partial(writer, body))

    def _by_fingerprint(self, fingerprint: bytes) -> AvroSchema | None:
        schema = self._known.get(fingerprint)
        if schema is None and len(fingerprint) == 8:
            schema = self._asked(lambda: self._lookup(fingerprint))
            if schema is not None:
                self._known[fingerprint] = schema
        return schema

    def _asked(self, ask: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + self._patience, FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except SchemasUnavailable as error:
                if time.monotonic() + pause > deadline:
                    raise
                log.warning("%s; retrying in %.1f s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
