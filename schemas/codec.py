"""Records to bytes and back.

Two wire formats, and readers accept both: Confluent framing (a zero byte, the registry's schema id in 4 bytes,
big-endian) where a registry is configured, Avro single-object encoding (C3 01, the writer schema's CRC-64-AVRO
fingerprint in 8 bytes) where none is. In the second the writer's schema is on `tentalis.schemas.v1`, so that the log
explains itself years later.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from schemas import avro
from schemas.avro import AvroSchema
from schemas.compiled import MOST_ITEMS, Encoder, Unsure, compiled
from schemas.partial import check_items, read_partial
from schemas.place import Place
from schemas.problems import problems
from schemas.records import RECORDS, Record

log = logging.getLogger(__name__)

T = TypeVar("T")

SINGLE_OBJECT = b"\xc3\x01"
CONFLUENT = b"\x00"
SMALL_BYTES = 2**16
"""A body up to here cannot hold so many items that they would be worth counting before it is decoded."""
REASON_CHARS = 1000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0


class DecodeError(Exception):
    """Bytes that are not a record of this topic. `stage` is `decode` (framing, schema, Avro) or `validate` (values)."""

    def __init__(self, reason: str, *, topic: str, partition: int, offset: int, schema: str, stage: str) -> None:
        # It goes into logs and headers, and may quote what somebody put into the record.
        reason = reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]}..."
        super().__init__(f"{Place(topic, partition, offset)}: {reason} (schema: {schema}, stage: {stage})")
        self.reason, self.topic, self.partition, self.offset = reason, topic, partition, offset
        self.schema, self.stage = schema, stage


class SchemasUnavailable(Exception):
    """A schema cannot be looked up now (the registry or the broker is away, or not prepared). Nothing is wrong with the
    record: it must be neither dead-lettered nor passed over."""


class Registry(Protocol):
    """What the codec needs of a schema registry."""

    def id_of(self, schema: AvroSchema) -> int:
        """Its id there. Raises SchemasUnavailable if the registry is away or lacks the schema."""
        ...

    def schema_by_id(self, schema_id: int) -> AvroSchema:
        """Raises LookupError for an id that the registry says it does not have, SchemasUnavailable if it is away."""
        ...


class Codec:
    """Encodes and decodes records; one per process.

    `lookup` finds a writer's schema that this code does not ship, by fingerprint: normally on `tentalis.schemas.v1`.
    `patience`: seconds for which registry and lookup are asked again (blocking, with back-off) while they are away,
    before SchemasUnavailable is raised.
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
        """Kept by callers that measure what they decode."""
        self._known = {schema.fingerprint: schema for schema in avro.all_current()}
        self._encoders: dict[str, tuple[Encoder, bytes]] = {}
        self._framings: dict[bytes, bytes] = {}

    def ready(self, name: str) -> bool:
        """Whether a record of this name is encoded without asking anybody."""
        return self._registry is None or name in self._encoders

    def prepare(self, name: str) -> None:
        """Asks what `encode` needs for records of this name. Blocking. Raises SchemasUnavailable."""
        if name not in self._encoders:
            self._encoders[name] = compiled(name).encode, self._framing(avro.current(name))

    def encode(self, topic: str, record: Record) -> bytes:
        """The wire bytes of a record for a topic. Raises SchemasUnavailable."""
        name = type(record).__name__
        if name not in self._encoders:
            self.prepare(name)
        encode, framing = self._encoders[name]
        return encode(record, framing)

    def encode_single(self, record: Record) -> bytes:
        """A record in single-object encoding, which asks nobody; see `reframed`."""
        name = type(record).__name__
        return compiled(name).encode(record, SINGLE_OBJECT + avro.current(name).fingerprint)

    def reframed(self, value: bytes) -> bytes:
        """What `encode_single` gave, in the framing that this codec writes; any other bytes as they are. Blocking.

        Raises SchemasUnavailable, and LookupError for bytes of a schema that nobody knows.
        """
        if self._registry is None or value[:2] != SINGLE_OBJECT:
            return value
        schema = self._by_fingerprint(value[2:10])
        if schema is None:
            raise LookupError(f"unknown schema {value[2:10].hex()}: neither shipped nor on tentalis.schemas.v1")
        return self._framing(schema) + value[10:]

    def _framing(self, schema: AvroSchema) -> bytes:
        """What stands before the bodies that are written with a schema."""
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
        """The record that the bytes stand for; `expected` are the record names that the topic holds.

        Raises DecodeError naming topic, partition, offset and schema for anything that is not such a record, and
        SchemasUnavailable where that cannot be told now.
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
                    "begins with a zero byte: either no record at all, or one in Confluent framing, "
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
                pass  # what is wrong with it, if anything, is said below
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
        """Of bytes that are no record, what can be read: the writer's record name, its fields up to where they make no
        sense, and why they end there. None if the framing names no known schema.
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
                log.warning("%s; asking again in %.1f s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
